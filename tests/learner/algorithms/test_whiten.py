"""Whitening against the statistics module, over one rank and over several."""

import math
from statistics import fmean, variance

import pytest
import torch
from torch import Tensor

from learner.algorithms.whiten import whiten

VALUES = [1.0, -2.0, 0.5, 4.0, 4.0, -0.25]


def of(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def own(sums: Tensor) -> Tensor:
    return sums


def slow(values: list[float]) -> list[float]:
    return [(value - fmean(values)) / math.sqrt(variance(values) + 1e-8) for value in values]


def test_whitened_equals_the_slow_loop() -> None:
    assert whiten(of(VALUES), own).tolist() == pytest.approx(slow(VALUES), rel=0, abs=1e-12)


def test_ranks_agree_on_the_mean_and_the_deviation() -> None:
    """Three ranks in step, one without tokens: each pass's sums are added up before any rank goes on."""
    parts = [of(VALUES[:4]), of([]), of(VALUES[4:])]
    sums = [[6.0, sum(VALUES)], [sum((value - fmean(VALUES)) ** 2 for value in VALUES)]]
    found = []
    for part in parts:
        passes = iter(sums)
        found += whiten(part, lambda _, passes=passes: of(next(passes))).tolist()  # type: ignore[misc]
    assert found == pytest.approx(slow(VALUES), rel=0, abs=1e-12)


@pytest.mark.parametrize("values", [[0.3], [0.1] * 7, [-1e6] * 3, []], ids=["one", "equal", "large", "none"])
def test_values_without_spread_give_zeros(values: list[float]) -> None:
    assert whiten(of(values), own).tolist() == pytest.approx([0.0] * len(values), abs=1e-9)


def test_a_small_spread_about_a_large_mean_is_not_lost() -> None:
    values = [1e6 + 1e-3 * value for value in VALUES]
    assert whiten(of(values), own).tolist() == pytest.approx(slow(values), rel=1e-6)


def test_an_advantage_counts_as_often_as_it_has_tokens() -> None:
    """One advantage of three tokens is three times the same one; one of none is moved but not looked at."""
    weights = of([2.0, 1.0, 0.0, 3.0, 1.0, 0.0])
    looked_at = [1.0, 1.0, -2.0, 4.0, 4.0, 4.0, 4.0]
    found = whiten(of(VALUES), own, weights).tolist()
    expected = slow(looked_at)
    assert [found[i] for i in (0, 1, 3, 4)] == pytest.approx([expected[i] for i in (0, 2, 3, 6)], abs=1e-12)
    assert found[2] == pytest.approx((0.5 - fmean(looked_at)) / math.sqrt(variance(looked_at) + 1e-8), abs=1e-12)
