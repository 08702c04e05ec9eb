"""GSPO's loss against a slow loop over answers written from eq. 5 to 7 of its paper, in float64."""

import math

import pytest
import torch

from learner.algorithms.losses.gspo import gspo_loss
from learner.algorithms.losses.policy_loss import Clip
from tests.learner.algorithms.slow_tokens import COUNTS, parts, random_tokens

CLIP = Clip(low=0.1, high=0.15, dual=3.0)


def slow(logprobs: list[float], old: list[float], advantages: list[float]) -> list[float]:
    if not logprobs:
        return []
    ratio = math.exp(sum(new - before for new, before in zip(logprobs, old, strict=True)) / len(logprobs))
    clipped = max(1.0 - CLIP.low, min(1.0 + CLIP.high, ratio))
    return [-min(ratio * advantages[0], clipped * advantages[0])] * len(logprobs)


@pytest.mark.parametrize("seed", range(5))
def test_gspo_equals_the_slow_loop(seed: int) -> None:
    logprobs, old, advantages = random_tokens(seed)
    loss, _ = gspo_loss(logprobs, old, advantages, COUNTS, CLIP)
    expected = [value for part in parts(logprobs, old, advantages) for value in slow(*part)]
    assert loss.tolist() == pytest.approx(expected, rel=0, abs=1e-12)


def test_gradient_goes_through_the_ratio_of_the_whole_answer() -> None:
    """Of a mean over an answer's n tokens, each token's logprob gets -s A / n, or nothing where the clip holds."""
    logprobs, old, advantages = random_tokens(2)
    loss, is_clipped = gspo_loss(logprobs, old, advantages, COUNTS, CLIP)
    counts = torch.tensor([count for count in COUNTS for _ in range(count)], dtype=torch.float64)
    (loss / counts).sum().backward()
    assert logprobs.grad is not None
    assert torch.equal(logprobs.grad == 0.0, is_clipped)
    assert 0 < int(is_clipped.sum()) < len(old)
    expected = torch.where(is_clipped, torch.zeros(()), loss.detach() / counts)
    torch.testing.assert_close(logprobs.grad, expected, rtol=0, atol=1e-12)


def test_micro_batch_without_tokens_has_no_loss() -> None:
    loss, is_clipped = gspo_loss(torch.zeros(0), torch.zeros(0), torch.zeros(0), (0,), CLIP)
    assert loss.tolist() == []
    assert is_clipped.tolist() == []


def test_drift_of_a_thousand_nats_stays_finite() -> None:
    loss, _ = gspo_loss(torch.zeros(3), torch.full((3,), -1e3), -torch.ones(3), (3,), CLIP)
    assert loss.tolist() == pytest.approx([math.exp(20.0)] * 3, rel=1e-5)
