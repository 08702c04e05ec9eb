"""A step's sums as figures: fresh and stale samples apart, the spread of the advantages."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from learner.models.gradient import StepResult
from learner.models.micro_batch import LearnerSample, MicroBatch, make_micro_batch
from learner.objectives.step_metrics import step_metrics, token_sums


def micro_batch(staleness: tuple[int, ...]) -> MicroBatch:
    """Return two trajectories of two and one model tokens, with the advantages 1, 1 and -0.5."""
    samples = [
        LearnerSample(np.array([1, 2, 3], np.int32), np.array([0, 1, 1], bool), np.array([0, -1, -1], np.float32), 1.0),
        LearnerSample(np.array([1, 2], np.int32), np.array([0, 1], bool), np.array([0, -1], np.float32), -0.5),
    ]
    return replace(make_micro_batch(samples), staleness=staleness)


def figures(staleness: tuple[int, ...]) -> dict[str, float]:
    before = torch.tensor([-0.5, -1.0, -1.5])
    sums = token_sums(before, torch.ones(3), torch.zeros(3, dtype=torch.bool), micro_batch(staleness))
    result = StepResult(True, 0.0, 0.0, {key: float(value) for key, value in sums.items()})
    return step_metrics([result], [result])


def k3(difference: float) -> float:
    return float(np.exp(difference) - 1 - difference)


def test_kl_is_told_for_fresh_and_for_stale_samples_apart() -> None:
    found = figures((0, 2))
    assert found["policy/kl_fresh"] == pytest.approx(k3(0.5) / 2, rel=1e-5)
    assert found["policy/kl_stale"] == pytest.approx(k3(-0.5), rel=1e-5)
    assert found["policy/kl_sampler"] == pytest.approx((k3(0.5) + k3(-0.5)) / 3, rel=1e-5)


def test_kl_of_an_age_that_no_sample_has_is_absent() -> None:
    assert "policy/kl_stale" not in figures((0, 0))
    assert "policy/kl_fresh" not in figures((1, 1))
    assert "policy/kl_stale" not in figures(())


def test_spread_of_the_advantages_is_over_tokens() -> None:
    assert figures((0, 0))["policy/advantage_std"] == pytest.approx(np.std([1.0, 1.0, -0.5]), rel=1e-5)
