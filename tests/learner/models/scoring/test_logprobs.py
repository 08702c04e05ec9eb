"""Token logprobs and entropy against log_softmax in float64, values and gradients."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from learner.models.scoring.logprobs import CHUNK_NUMBERS, token_logprobs

# One chunk; chunks of 4, 4 and 1 tokens; a chunk for each token.
chunked = pytest.mark.parametrize("chunk_numbers", [CHUNK_NUMBERS, 4 * 37, 1])


@chunked
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_token_logprobs_and_entropy_equal_log_softmax(temperature: float, chunk_numbers: int) -> None:
    torch.manual_seed(0)
    logits, targets = 4.0 * torch.randn(9, 37), torch.randint(0, 37, (9,))
    expected = (logits.double() / temperature).log_softmax(-1)
    logprobs, entropy = token_logprobs(logits, targets, temperature, chunk_numbers=chunk_numbers)
    torch.testing.assert_close(logprobs.double(), expected.gather(1, targets[:, None])[:, 0], rtol=0, atol=2e-6)
    torch.testing.assert_close(entropy.double(), -(expected.exp() * expected).sum(-1), rtol=0, atol=2e-6)


@chunked
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradient_of_token_logprobs_equals_that_of_log_softmax(temperature: float, chunk_numbers: int) -> None:
    torch.manual_seed(1)
    logits, targets, weights = torch.randn(9, 37), torch.randint(0, 37, (9,)), torch.randn(9)
    ours, reference = logits.clone().requires_grad_(), logits.double().requires_grad_()
    (token_logprobs(ours, targets, temperature, chunk_numbers=chunk_numbers)[0] * weights).sum().backward()
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


def test_logits_in_bfloat16_are_computed_on_in_float32_and_get_a_gradient_in_bfloat16() -> None:
    torch.manual_seed(2)
    logits = (4.0 * torch.randn(9, 37)).to(torch.bfloat16).requires_grad_()
    targets = torch.randint(0, 37, (9,))
    found, _ = token_logprobs(logits, targets)
    expected = logits.detach().double().log_softmax(-1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-6)
    found.sum().backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16


def test_no_tokens_give_nothing() -> None:
    logits = torch.zeros(0, 37, requires_grad=True)
    found, entropy = token_logprobs(logits, torch.zeros(0, dtype=torch.long))
    found.sum().backward()
    assert (found.shape, entropy.shape) == ((0,), (0,))
    assert logits.grad is not None


_MEASURE = """
import re, torch
from pathlib import Path
from learner.models.scoring.logprobs import token_logprobs
torch.set_num_threads(1)
K, V = 2048, 40000
logits = torch.zeros(K, V, dtype=torch.bfloat16, requires_grad=True)
def kib(key):
    return int(re.search(key + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text()).group(1))
Path("/proc/self/clear_refs").write_text("5")  # the highest so far, of the imports, is forgotten
before = kib("VmRSS")
token_logprobs(logits, torch.zeros(K, dtype=torch.long))[0].sum().backward()
print((kib("VmHWM") - before) * 1024 / (K * V))
"""


def test_memory_besides_the_logits_is_their_gradient_and_a_few_chunks() -> None:
    """In bfloat16 2 bytes for each token and vocabulary entry; a float32 of that shape would be 4 alone."""
    root = Path(__file__).parents[4]
    ended = subprocess.run([sys.executable, "-c", _MEASURE], cwd=root, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr[-2000:]
    chunks = 5 * (1 << 24) * 4 / (2048 * 40000)
    assert 1.9 < float(ended.stdout) < 2.1 + chunks
