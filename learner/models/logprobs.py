"""Log-probabilities of given tokens, and the entropy of their distributions, from logits.

Shapes: K tokens, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


def token_logprobs(
    logits: Tensor, targets: Tensor, temperature: float = 1.0, *, with_entropy: bool = True
) -> tuple[Tensor, Tensor]:
    """Return (logprobs [K], entropy [K]) of softmax(logits / temperature), float32 natural logs.

    logits: [K, V], any float type, computed on in float32. targets: [K] int64. Only logprobs carry a gradient.
    Memory: one float32 [K, V] is kept for the backward pass; autograd of log_softmax and entropy would keep three.
    """
    return _apply(logits, targets, temperature, with_entropy)


class _TokenLogprobs(Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        scores = logits.float()
        if temperature != 1.0:
            scores = scores / temperature
        scores = torch.log_softmax(scores, dim=-1)
        logprobs = scores.gather(1, targets[:, None]).squeeze(1)
        probabilities = scores.exp()
        entropy = -torch.linalg.vecdot(probabilities, scores) if with_entropy else torch.zeros_like(logprobs)
        ctx.save_for_backward(probabilities, targets)
        ctx.dtype, ctx.temperature = logits.dtype, temperature
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, targets = ctx.saved_tensors
        by_token = grads[0][:, None] / ctx.temperature
        # d logp / d logits = (onehot(target) - p) / temperature
        grad = probabilities * -by_token
        grad.scatter_add_(1, targets[:, None], by_token)
        return grad.to(ctx.dtype), None, None, None


# `apply` has no types of its own.
_apply: Callable[[Tensor, Tensor, float, bool], tuple[Tensor, Tensor]] = _TokenLogprobs.apply
