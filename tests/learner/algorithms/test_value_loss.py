"""The value loss against a slow loop written from the formula, in float64."""

import pytest
import torch

from learner.algorithms.losses.value_loss import value_loss


def slow(value: float, old: float, target: float, clip: float) -> float:
    clipped = min(max(value, old - clip), old + clip)
    return 0.5 * max((value - target) ** 2, (clipped - target) ** 2)


@pytest.mark.parametrize("clip", [0.5, 0.2, 1e9])
def test_value_loss_equals_the_slow_loop_and_says_what_has_no_gradient(clip: float) -> None:
    generator = torch.Generator().manual_seed(1)
    values, old, returns = torch.randn(3, 200, generator=generator, dtype=torch.float64)
    values.requires_grad_()
    loss, is_clipped = value_loss(values, old, returns, clip)
    expected = [slow(*case, clip) for case in zip(values.tolist(), old.tolist(), returns.tolist(), strict=True)]
    assert loss.tolist() == pytest.approx(expected, rel=0, abs=1e-12)
    loss.sum().backward()
    assert values.grad is not None
    assert torch.equal(values.grad == 0.0, is_clipped)
    assert bool(is_clipped.any()) == (clip < 1.0)
