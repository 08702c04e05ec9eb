"""CISPO's loss and gradient against a slow loop written from eq. 4 and 5 of its paper, in float64."""

import math

import pytest

from learner.algorithms.losses.cispo import cispo_loss
from learner.algorithms.losses.policy_loss import Clip
from tests.learner.algorithms.slow_tokens import COUNTS, random_tokens

CLIP = Clip(low=0.2, high=0.5, dual=3.0)


@pytest.mark.parametrize("seed", range(3))
def test_cispo_equals_the_slow_loop(seed: int) -> None:
    logprobs, old, advantages = random_tokens(seed)
    loss, is_cut = cispo_loss(logprobs, old, advantages, COUNTS, CLIP)
    loss.sum().backward()
    assert logprobs.grad is not None
    cases = zip(logprobs.tolist(), old.tolist(), advantages.tolist(), strict=True)
    weights = [(min(1.5, math.exp(new - before)), new, advantage) for new, before, advantage in cases]
    assert loss.tolist() == pytest.approx([-w * a * new for w, new, a in weights], rel=0, abs=1e-12)
    assert logprobs.grad.tolist() == pytest.approx([-w * a for w, _, a in weights], rel=0, abs=1e-12)
    assert is_cut.tolist() == [w == 1.5 for w, _, _ in weights]
    assert 0 < int(is_cut.sum()) < len(old)
