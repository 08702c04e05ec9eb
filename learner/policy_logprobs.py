"""Log-probabilities of given tokens, and the entropy of their distributions, from logits.

Called by `learner.policy` on the logits of the predicting positions alone. Shapes: K tokens, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


def token_logprobs(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return (logprobs [K], entropy [K]), float32 natural logs. The gradient flows through logprobs only.

    logits: [K, V], any float type, computed on in float32. targets: [K] int64. Memory: one float32 [K, V] is kept for
    the backward pass, where autograd of log_softmax and entropy would keep three.
    """
    logprobs, entropy = _TokenLogprobs.apply(logits, targets)  # type: ignore[no-untyped-call]
    return logprobs, entropy


class _TokenLogprobs(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.log_softmax(logits.float(), dim=-1)
        logprobs = scores.gather(1, targets[:, None]).squeeze(1)
        probabilities = scores.exp()
        entropy = -torch.linalg.vecdot(probabilities, scores)
        ctx.save_for_backward(probabilities, targets)
        ctx.dtype = logits.dtype
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        probabilities, targets = ctx.saved_tensors
        # d logp / d logits = onehot(target) - p
        grad = probabilities * -grads[0][:, None]
        grad.scatter_add_(1, targets[:, None], grads[0][:, None])
        return grad.to(ctx.dtype), None
