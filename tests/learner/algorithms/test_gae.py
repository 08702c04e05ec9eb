"""Advantages of tokens against the double sums that define them, in float64."""

import pytest
import torch
from torch import Tensor

from learner.algorithms.advantages.gae import gae_advantages
from learner.algorithms.advantages.reinforce_pp import reinforce_pp_advantages

FACTORS = [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (1.0, 0.9), (0.0, 1.0)]


def random_case(num: int) -> tuple[Tensor, Tensor]:
    rewards, values = torch.randn(2, num, generator=torch.Generator().manual_seed(num), dtype=torch.float64)
    return rewards, values


def slow_gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    after = [*values[1:], 0.0][: len(values)]
    errors = [r + gamma * v - own for r, v, own in zip(rewards, after, values, strict=True)]
    return [sum((gamma * lam) ** (k - t) * errors[k] for k in range(t, len(errors))) for t in range(len(errors))]


@pytest.mark.parametrize("num", [0, 1, 2, 40])
@pytest.mark.parametrize(("gamma", "lam"), FACTORS)
def test_gae_equals_the_slow_loop(num: int, gamma: float, lam: float) -> None:
    rewards, values = random_case(num)
    expected = slow_gae(rewards.tolist(), values.tolist(), gamma, lam)
    assert gae_advantages(rewards, values, gamma, lam).tolist() == pytest.approx(expected, rel=0, abs=1e-9)


@pytest.mark.parametrize("num", [0, 1, 2, 40])
@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_reinforce_pp_equals_the_slow_loop(num: int, gamma: float) -> None:
    rewards, _ = random_case(num)
    given = rewards.tolist()
    expected = [sum(gamma ** (k - t) * given[k] for k in range(t, num)) for t in range(num)]
    assert reinforce_pp_advantages(rewards, None, gamma, 0.5).tolist() == pytest.approx(expected, rel=0, abs=1e-9)


def test_values_of_two_turns_meet_over_the_reply_between_them() -> None:
    """Model tokens 0, 1 | reply | 2: the delta of token 1 looks at the value of token 2, undiscounted by the reply."""
    rewards, values = torch.tensor([0.0, 0.0, 1.0]).double(), torch.tensor([0.5, 0.25, 0.75]).double()
    assert gae_advantages(rewards, values, 0.5, 0.0).tolist() == [-0.375, 0.125, 0.25]


def test_gae_at_gamma_and_lambda_1_is_the_return_less_the_value() -> None:
    rewards, values = random_case(12)
    expected = rewards.flip(0).cumsum(0).flip(0) - values
    torch.testing.assert_close(gae_advantages(rewards, values, 1.0, 1.0), expected, rtol=0, atol=1e-12)


def test_values_in_float32_are_summed_in_float64() -> None:
    rewards, values = random_case(500)
    found = gae_advantages(rewards, values.float(), 0.999, 0.97).tolist()
    expected = slow_gae(rewards.tolist(), values.float().double().tolist(), 0.999, 0.97)
    assert found == pytest.approx(expected, rel=0, abs=1e-9)
