"""The critic's figures of a step, from sums over tokens."""

import math

import pytest

from learner.models.gradient import StepResult
from learner.objectives.policy_gradient import critic_metrics

FIRST = {
    "tokens": 4.0,
    "clipped": 1.0,
    "value": 2.0,
    "return": 6.0,
    "return_squared": 17.0,
    "error": 4.0,
    "error_squared": 6.0,
}
SECOND = dict.fromkeys(FIRST, 0.0) | {"tokens": 4.0, "clipped": 2.0, "value": 8.0}


def result(sums: dict[str, float], loss: float = 0.5) -> StepResult:
    return StepResult(True, loss, 2.0 * loss, sums)


def test_values_are_of_the_first_epoch_and_clips_of_all_updates() -> None:
    metrics = critic_metrics([result(FIRST), result(SECOND, 1.5)], num_in_epoch=1)
    assert metrics == pytest.approx(
        {
            "critic/loss": 1.0,
            "critic/grad_norm": 2.0,
            "critic/num_updates": 2,
            "critic/value_mean": 0.5,
            "critic/return_mean": 1.5,
            "critic/clip_share": 3.0 / 8.0,
            "critic/explained_share": 1.0 - (6.0 / 4.0 - 1.0) / (17.0 / 4.0 - 1.5**2),
        }
    )


def test_equal_returns_have_no_explained_variance() -> None:
    metrics = critic_metrics([result(FIRST | {"return_squared": 9.0})], num_in_epoch=1)
    assert math.isnan(metrics["critic/explained_share"])


def test_step_without_critic_updates_has_no_figures() -> None:
    assert critic_metrics([], num_in_epoch=1) == {}
