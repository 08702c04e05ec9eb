"""Entries with weights: their shares, their epochs, and an order that a position alone decides."""

from collections import Counter

import pytest

from learner.data.prompt_order import MixedOrder, PromptOrder, order_name, order_of
from protocol.errors import SettingsError


def test_order_without_weights_is_that_of_all_rows_as_one_list() -> None:
    mixed, plain = order_of([2, 5, 1], None, 7, True), PromptOrder(8, 7)
    assert [mixed.at(position) for position in range(24)] == [plain.at(position) for position in range(24)]


def test_order_as_the_rows_lie_is_not_shuffled() -> None:
    order = order_of([2, 1], None, 7, False)
    assert [order.at(position) for position in range(4)] == [(0, 0), (0, 1), (0, 2), (1, 0)]


def test_entries_get_their_shares_of_every_ten_thousand() -> None:
    order = MixedOrder([3, 50, 50_000], [1.0, 2.0, 5.0], seed=3)
    for block in range(2):
        indexes = [order.at(position)[1] for position in range(block * 10_000, (block + 1) * 10_000)]
        assert Counter(0 if i < 3 else 1 if i < 53 else 2 for i in indexes) == {0: 1250, 1: 2500, 2: 6250}


def test_no_prompt_is_given_out_twice_in_an_epoch_and_none_is_left_out() -> None:
    order = MixedOrder([3, 50], [1.0, 1.0], seed=3)
    places = [order.at(position) for position in range(20_000)]
    assert len(set(places)) == len(places)
    for first, rows in ((0, 3), (3, 50)):
        epochs = Counter(epoch for epoch, index in places if first <= index < first + rows)
        assert sorted(epochs) == list(range(len(epochs)))
        assert {count for epoch, count in epochs.items() if epoch < len(epochs) - 1} == {rows}


def test_order_is_the_same_from_any_position_and_another_with_another_seed() -> None:
    made = [MixedOrder([30, 50], [1.0, 3.0], seed).at for seed in (3, 3, 4)]
    first = [made[0](position) for position in range(300)]
    assert [made[1](position) for position in reversed(range(300))] == first[::-1]
    assert [made[2](position) for position in range(300)] != first


def test_entries_of_one_size_are_shuffled_each_in_its_own_way() -> None:
    order = MixedOrder([40, 40], [1.0, 1.0], seed=3)
    rows: dict[int, list[int]] = {0: [], 1: []}
    for position in range(400):
        index = order.at(position)[1]
        rows[index // 40].append(index % 40)
    assert rows[0][:40] != rows[1][:40]
    assert sorted(rows[0][:40]) == list(range(40))


def test_weight_that_is_never_drawn_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"entry 1 .* the weight 1 of 100001, less than one in 10,000 prompts\."):
        MixedOrder([5, 5], [1.0, 100_000.0], seed=0)


def test_entry_without_a_row_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"entry 2 of data\.train has no usable row\. Leave it out\."):
        MixedOrder([5, 0], [1.0, 1.0], seed=0)


def test_name_of_an_order_tells_apart_what_gives_another_order() -> None:
    given = [(None, True), (None, False), ([1.0, 1.0], True), ([1.0, 1.0], False), ([1.0, 2.0], True)]
    assert len({order_name([5, 5], weights, shuffle) for weights, shuffle in given}) == 5
    assert order_name([5, 5], [1.0, 1.0], True) == order_name([5, 5], [2.0, 2.0], True)
    assert order_name([5, 5], [1.0, 1.0], True) != order_name([4, 6], [1.0, 1.0], True)
