"""Token logprobs and entropy against log_softmax in float64, values and gradients."""

import pytest
import torch

from learner.models.logprobs import token_logprobs


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_token_logprobs_and_entropy_equal_log_softmax(temperature: float) -> None:
    torch.manual_seed(0)
    logits, targets = 4.0 * torch.randn(9, 37), torch.randint(0, 37, (9,))
    expected = (logits.double() / temperature).log_softmax(-1)
    logprobs, entropy = token_logprobs(logits, targets, temperature)
    torch.testing.assert_close(logprobs.double(), expected.gather(1, targets[:, None])[:, 0], rtol=0, atol=2e-6)
    torch.testing.assert_close(entropy.double(), -(expected.exp() * expected).sum(-1), rtol=0, atol=2e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradient_of_token_logprobs_equals_that_of_log_softmax(temperature: float) -> None:
    torch.manual_seed(1)
    logits, targets, weights = torch.randn(9, 37), torch.randint(0, 37, (9,)), torch.randn(9)
    ours, reference = logits.clone().requires_grad_(), logits.double().requires_grad_()
    (token_logprobs(ours, targets, temperature)[0] * weights).sum().backward()
    plain = (reference / temperature).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    (plain * weights.double()).sum().backward()
    assert ours.grad is not None
    assert reference.grad is not None
    torch.testing.assert_close(ours.grad.double(), reference.grad, rtol=0, atol=1e-6)


def test_entropy_carries_no_gradient() -> None:
    logits = torch.randn(3, 5, requires_grad=True)
    logprobs, entropy = token_logprobs(logits, torch.zeros(3, dtype=torch.long))
    assert logprobs.requires_grad
    assert not entropy.requires_grad


def test_entropy_is_zeros_when_it_is_not_wanted() -> None:
    logits = torch.randn(3, 5)
    assert token_logprobs(logits, torch.zeros(3, dtype=torch.long), with_entropy=False)[1].tolist() == [0.0, 0.0, 0.0]
