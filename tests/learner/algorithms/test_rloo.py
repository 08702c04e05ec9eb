"""RLOO's advantages against a slow loop written from the formula, in float64."""

import pytest

from tests.learner.algorithms.slow_groups import REWARDS, advantages_of, check_every_advantage


def slow(group: list[float]) -> list[float]:
    return [r - (sum(group) - r) / (len(group) - 1) for r in group]


def test_rloo_equals_the_slow_loop() -> None:
    for found, group in zip(advantages_of("rloo"), REWARDS, strict=True):
        assert found == pytest.approx(slow(group), rel=0, abs=1e-12)


def test_rloo_is_exactly_zero_for_equal_rewards_and_refuses_a_group_of_one() -> None:
    check_every_advantage("rloo")
