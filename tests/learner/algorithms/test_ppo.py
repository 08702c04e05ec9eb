"""PPO's loss against a slow loop written from eq. 7 of the paper and eq. 5 of dual clip, in float64."""

import math

import pytest
import torch
from torch import Tensor

from learner.algorithms.losses.policy_loss import Clip
from learner.algorithms.losses.ppo import ppo_loss

CLIP = Clip(low=0.2, high=0.28, dual=3.0)


def random_case(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    old = -3.0 * torch.rand(200, generator=generator, dtype=torch.float64)
    logprobs = old + 0.8 * torch.randn(200, generator=generator, dtype=torch.float64)
    return logprobs.requires_grad_(), old, torch.randn(200, generator=generator, dtype=torch.float64)


def slow_ppo(logp: float, old: float, advantage: float, clip: Clip) -> float:
    ratio = math.exp(max(-20.0, min(20.0, logp - old)))
    clipped = max(1.0 - clip.low, min(1.0 + clip.high, ratio))
    gain = min(ratio * advantage, clipped * advantage)
    if advantage < 0.0:
        gain = max(gain, clip.dual * advantage)
    return -gain


@pytest.mark.parametrize("clip", [CLIP, Clip(low=0.5, high=0.1, dual=1.5)])
@pytest.mark.parametrize("seed", range(3))
def test_ppo_equals_the_slow_loop(seed: int, clip: Clip) -> None:
    logprobs, old, advantages = random_case(seed)
    loss, _ = ppo_loss(logprobs, old, advantages, (50, 150), clip)
    cases = zip(logprobs.tolist(), old.tolist(), advantages.tolist(), strict=True)
    expected = [slow_ppo(*case, clip) for case in cases]
    torch.testing.assert_close(loss, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)


def test_ppo_says_which_tokens_have_no_gradient() -> None:
    logprobs, old, advantages = random_case(4)
    loss, is_clipped = ppo_loss(logprobs, old, advantages, (50, 150), CLIP)
    loss.sum().backward()
    assert logprobs.grad is not None
    assert torch.equal(logprobs.grad == 0.0, is_clipped)
    assert 0 < int(is_clipped.sum()) < 200


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [(1.0, 2.0, -2.0), (1.5, 2.0, -2.56), (0.5, 2.0, -1.0), (0.5, -2.0, 1.6), (1.5, -2.0, 3.0), (9.0, -2.0, 6.0)],
)
def test_ppo_clips_where_it_should(ratio: float, advantage: float, expected: float) -> None:
    loss, _ = ppo_loss(torch.tensor([math.log(ratio)]), torch.zeros(1), torch.tensor([advantage]), (1,), CLIP)
    assert loss.item() == pytest.approx(expected, rel=1e-6)
