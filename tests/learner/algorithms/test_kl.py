"""KL estimates against a slow loop, and the controller against the formula."""

import math

import pytest
import torch

from learner.algorithms.kl import KL_FORMS, next_coefficient

SLOW = {"k1": lambda d: d, "k2": lambda d: d * d / 2.0, "k3": lambda d: math.exp(-d) - 1.0 + d}


@pytest.mark.parametrize("name", sorted(KL_FORMS))
def test_kl_equals_the_slow_loop_and_stays_within_10(name: str) -> None:
    differences = [0.0, 1e-4, -1e-4, 0.7, -0.7, 2.4, -2.4, 9.9, -9.9, 15.0, -15.0, 300.0, -300.0]
    logprobs = torch.tensor(differences, dtype=torch.float64) - 1.0
    expected = [min(10.0, max(-10.0, SLOW[name](min(20.0, max(-20.0, d))))) for d in differences]
    assert KL_FORMS[name](logprobs, torch.full_like(logprobs, -1.0)).tolist() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("name", "expected"), [("k1", 1.0), ("k2", 0.3), ("k3", 1.0 - math.exp(-0.3))])
def test_kl_in_a_loss_has_the_gradient_of_its_formula(name: str, expected: float) -> None:
    logprobs = torch.tensor([-0.7], dtype=torch.float64, requires_grad=True)
    KL_FORMS[name](logprobs, torch.tensor([-1.0], dtype=torch.float64)).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(expected, rel=1e-12)


def test_estimates_have_the_divergence_as_their_mean() -> None:
    """Exactly, over all tokens of two distributions: k1 and k3 are unbiased."""
    logits, other = torch.tensor([[0.3, -0.2, 1.0, 0.1], [0.1, 0.0, 0.8, 0.4]], dtype=torch.float64).log_softmax(-1)
    divergence = (logits.exp() * (logits - other)).sum().item()
    for name in ("k1", "k3"):
        assert (logits.exp() * KL_FORMS[name](logits, other)).sum().item() == pytest.approx(divergence, rel=1e-12)


@pytest.mark.parametrize(
    ("kl", "expected"),
    [(6.0, 0.01), (6.6, 0.01 * (1 + 0.1 * 64 / 1000)), (60.0, 0.01 * (1 + 0.2 * 64 / 1000)), (-1.0, 0.01 * 0.9872)],
)
def test_adaptive_coefficient_follows_the_error_of_at_most_20_percent(kl: float, expected: float) -> None:
    found = next_coefficient(0.01, kl, 64, target=6.0, horizon=1000.0)
    assert found == pytest.approx(expected, rel=1e-12)
