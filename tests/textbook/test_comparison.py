"""The verdict on two learners' weights, in figures and in words."""

import math

import pytest
import torch

from tests.textbook.comparison import bits_of, compare

BEFORE = {"policy/a": torch.zeros(3), "policy/b": torch.zeros(1)}
PLAIN = {"policy/a": torch.tensor([3.0, 0.0, 0.0]), "policy/b": torch.tensor([4.0])}


def test_same_bits_are_the_same_after_each_step() -> None:
    found = compare(BEFORE, PLAIN, {name: weight.clone() for name, weight in PLAIN.items()}, None)
    assert found.holds
    assert (found.num_same, found.num_tensors, found.largest, found.apart, found.moved) == (2, 2, 0.0, 0.0, 5.0)
    assert found.sentence(3) == "The weights are the same, bit for bit, after each of 3 steps."


def test_rounding_is_small_beside_how_far_the_weights_moved() -> None:
    found = compare(BEFORE, PLAIN, PLAIN | {"policy/b": torch.tensor([4.0 + 2**-10])}, 2)
    assert found.holds
    assert (found.num_same, found.largest, found.apart) == (1, 2**-10, 2**-10 / 5.0)
    assert found.sentence(3) == (
        "The weights are the same but for rounding: the largest difference is 0.00098, and all differences are 0.0002 "
        "of how far the weights moved; the first bit differed after step 2."
    )


@pytest.mark.parametrize("other", [3.0, math.nan])
def test_other_weights_are_not_the_same(other: float) -> None:
    found = compare(BEFORE, PLAIN, PLAIN | {"policy/b": torch.tensor([other])}, 1)
    assert not found.holds
    assert found.sentence(3).startswith("The weights are not the same: the largest difference is ")


def test_a_policy_that_is_wrong_is_no_rounding_of_a_critic_that_moves_much_further() -> None:
    before = {"policy/a": torch.zeros(1), "critic/a": torch.zeros(1)}
    plain = {"policy/a": torch.tensor([1.0]), "critic/a": torch.tensor([100.0])}
    found = compare(before, plain, plain | {"policy/a": torch.tensor([-1.0])}, 1)
    assert found.apart == 2.0
    assert not found.holds


def test_weights_that_did_not_move_prove_nothing() -> None:
    found = compare(BEFORE, BEFORE, BEFORE, None)
    assert not found.holds
    assert found.sentence(3) == (
        "The steps moved no weight, so there is nothing to compare. Raise learner.lr or run.max_steps."
    )


def test_weights_of_other_models_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^weights of other models: \['policy/b'\]$"):
        compare(BEFORE, PLAIN, {"policy/a": PLAIN["policy/a"]}, None)


def test_bits_are_of_every_weight_and_its_name() -> None:
    assert bits_of(PLAIN) == bits_of(dict(reversed(PLAIN.items())))
    assert bits_of(PLAIN) != bits_of(BEFORE)
    assert bits_of({"x": torch.tensor(0.0)}) != bits_of({"x": torch.tensor(-0.0)})
