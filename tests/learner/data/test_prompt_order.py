"""The order of prompts: seeded, a permutation in every epoch, the same after a restart."""

from learner.data.prompt_order import PromptOrder


def test_order_is_the_one_of_its_example() -> None:
    order = PromptOrder(num_prompts=3, seed=1)
    assert [order.at(position) for position in range(4)] == [(0, 0), (0, 1), (0, 2), (1, 2)]


def test_order_holds_every_prompt_once_in_every_epoch() -> None:
    order = PromptOrder(num_prompts=50, seed=3)
    for epoch in range(3):
        places = [order.at(position) for position in range(50 * epoch, 50 * (epoch + 1))]
        assert {epoch_of for epoch_of, _ in places} == {epoch}
        assert sorted(index for _, index in places) == list(range(50))


def test_order_differs_between_epochs_and_seeds() -> None:
    first = [PromptOrder(50, seed=3).at(p)[1] for p in range(50)]
    assert first != [PromptOrder(50, seed=3).at(p)[1] for p in range(50, 100)]
    assert first != [PromptOrder(50, seed=4).at(p)[1] for p in range(50)]


def test_order_is_the_same_from_any_position_on() -> None:
    order = PromptOrder(num_prompts=7, seed=5)
    assert [order.at(p) for p in range(20)] == [PromptOrder(7, seed=5).at(p) for p in range(20)]
    assert order.at(3) == PromptOrder(7, seed=5).at(3)
