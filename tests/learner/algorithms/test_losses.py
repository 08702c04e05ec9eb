"""Policy losses and corrections against slow loops written from the formulas, in float64."""

import math

import pytest
import torch
from torch import Tensor

from learner.algorithms.by_name import CORRECTIONS, LOSSES
from learner.algorithms.losses.clipped import Clip
from learner.algorithms.ratio import log_ratio

CLIP = Clip(0.2, 0.28)


def random_case(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    old = -3.0 * torch.rand(200, generator=generator, dtype=torch.float64)
    logprobs = old + 0.8 * torch.randn(200, generator=generator, dtype=torch.float64)
    return logprobs.requires_grad_(), old, torch.randn(200, generator=generator, dtype=torch.float64)


def slow_ppo(logp: float, old: float, advantage: float) -> float:
    ratio = math.exp(max(-20.0, min(20.0, logp - old)))
    clipped = max(1.0 - CLIP.low, min(1.0 + CLIP.high, ratio))
    gain = min(ratio * advantage, clipped * advantage)
    if advantage < 0.0:
        gain = max(gain, 3.0 * advantage)
    return -gain


@pytest.mark.parametrize("seed", range(3))
def test_ppo_equals_the_slow_loop(seed: int) -> None:
    logprobs, old, advantages = random_case(seed)
    loss, _ = LOSSES["ppo"](logprobs, old, advantages, CLIP)
    expected = [slow_ppo(*case) for case in zip(logprobs.tolist(), old.tolist(), advantages.tolist(), strict=True)]
    torch.testing.assert_close(loss, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)


def test_ppo_says_which_tokens_have_no_gradient() -> None:
    logprobs, old, advantages = random_case(4)
    loss, is_clipped = LOSSES["ppo"](logprobs, old, advantages, CLIP)
    loss.sum().backward()
    assert logprobs.grad is not None
    assert torch.equal(logprobs.grad == 0.0, is_clipped)
    assert 0 < int(is_clipped.sum()) < 200


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [(1.0, 2.0, -2.0), (1.5, 2.0, -2.56), (0.5, 2.0, -1.0), (0.5, -2.0, 1.6), (1.5, -2.0, 3.0), (9.0, -2.0, 6.0)],
)
def test_ppo_clips_where_it_should(ratio: float, advantage: float, expected: float) -> None:
    loss, _ = LOSSES["ppo"](torch.tensor([math.log(ratio)]), torch.zeros(1), torch.tensor([advantage]), CLIP)
    assert loss.item() == pytest.approx(expected, rel=1e-6)


def test_reinforce_is_the_negative_weighted_logprob() -> None:
    logprobs, old, advantages = random_case(5)
    loss, is_clipped = LOSSES["reinforce"](logprobs, old, advantages, CLIP)
    assert torch.equal(loss, -advantages * logprobs)
    assert not is_clipped.any()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("none", [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("tis", [0.1, 0.5, 1.0, 2.0, 2.0, 2.0]),
        ("icepop", [0.0, 0.5, 1.0, 2.0, 0.0, 0.0]),
    ],
)
def test_corrections_of_given_ratios(name: str, expected: list[float]) -> None:
    ratio = torch.tensor([0.1, 0.5, 1.0, 2.0, 2.1, 50.0])
    assert CORRECTIONS[name](ratio).tolist() == pytest.approx(expected, rel=1e-6)


def test_log_ratio_stays_within_20() -> None:
    assert log_ratio(torch.tensor([0.0, -500.0, -1.0]), torch.tensor([-500.0, 0.0, -1.5])).tolist() == [
        20.0,
        -20.0,
        0.5,
    ]
