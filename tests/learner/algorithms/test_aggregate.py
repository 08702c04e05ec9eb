"""Aggregations against a slow loop over trajectories and their tokens, in float64."""

import pytest
import torch

from learner.algorithms.aggregate import AGGREGATES

LOSSES = [[0.5, -1.0, 2.0, 0.25], [3.0], [], [-4.0, 1.5]]


def slow(name: str, constant: float) -> float:
    trained = [tokens for tokens in LOSSES if tokens]
    if name == "token_mean":
        return sum(map(sum, trained)) / sum(map(len, trained))
    each = [sum(t) / len(t) if name == "seq_mean_token_mean" else sum(t) for t in trained]
    return sum(each) / len(trained) / (constant if name == "seq_sum_norm" else 1.0)


@pytest.mark.parametrize("name", sorted(AGGREGATES))
def test_aggregate_equals_the_slow_loop(name: str) -> None:
    weights = AGGREGATES[name](torch.tensor([len(t) for t in LOSSES], dtype=torch.float64), 8.0)
    found = sum(weight * sum(tokens) for weight, tokens in zip(weights.tolist(), LOSSES, strict=True))
    assert found == pytest.approx(slow(name, 8.0), rel=0, abs=1e-12)
    assert weights[2] == 0.0


@pytest.mark.parametrize("name", sorted(AGGREGATES))
def test_update_without_a_model_token_has_weights_of_zero(name: str) -> None:
    assert AGGREGATES[name](torch.zeros(3, dtype=torch.float64), 8.0).tolist() == [0.0, 0.0, 0.0]
