"""Log-probabilities of given tokens, and the entropy of their distributions, from logits.

Shapes: K tokens, V vocabulary, C tokens of a chunk.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

# Numbers of one chunk in float32: 64 MiB, recomputed in the backward pass.
CHUNK_NUMBERS = 1 << 24


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    *,
    with_entropy: bool = True,
    chunk_numbers: int = CHUNK_NUMBERS,
) -> tuple[Tensor, Tensor]:
    """Return (logprobs [K], entropy [K]) of softmax(logits / temperature), float32 natural logs.

    logits: [K, V], any float type, converted to float32 chunk_numbers at a time. targets: [K] int64. Only
    logprobs carry a gradient.
    Memory: the logits, their gradient in their own type, and a few times [C, V] in float32, whatever K is.
    """
    return _apply(logits, targets, temperature, with_entropy, chunk_numbers)


class _TokenLogprobs(Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, with_entropy: bool, chunk_numbers: int
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=logits.device)
        entropy = torch.zeros_like(logprobs)
        for chunk in _chunks(logits, chunk_numbers):
            scores = _log_softmax(logits[chunk], temperature)
            logprobs[chunk] = scores.gather(1, targets[chunk, None]).squeeze(1)
            if with_entropy:
                entropy[chunk] = -torch.linalg.vecdot(scores.exp(), scores)
        ctx.save_for_backward(logits, targets)
        ctx.temperature, ctx.chunk_numbers = temperature, chunk_numbers
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, targets = ctx.saved_tensors
        by_token = grads[0][:, None] / ctx.temperature
        grad = torch.empty_like(logits)
        for chunk in _chunks(logits, ctx.chunk_numbers):
            # d logp / d logits = (onehot(target) - p) / temperature
            of_chunk = _log_softmax(logits[chunk], ctx.temperature).exp_().mul_(-by_token[chunk])
            grad[chunk] = of_chunk.scatter_add_(1, targets[chunk, None], by_token[chunk])
        return grad, None, None, None, None


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    scores = logits.float()
    return torch.log_softmax(scores if temperature == 1.0 else scores / temperature, dim=-1)


def _chunks(logits: Tensor, numbers: int) -> Iterator[slice]:
    """Yield runs of tokens with at most `numbers` logits, at least one token each."""
    size = max(1, numbers // logits.shape[1])
    for start in range(0, logits.shape[0], size):
        yield slice(start, start + size)


# `apply` has no types of its own.
_apply: Callable[[Tensor, Tensor, float, bool, int], tuple[Tensor, Tensor]] = _TokenLogprobs.apply
