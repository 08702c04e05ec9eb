"""Trajectories of tokens for losses, corrections and advantages of tokens: some of one token, one of none."""

import torch
from torch import Tensor

COUNTS = (5, 1, 0, 9, 1, 4)


def random_tokens(seed: int, scale: float = 0.8) -> tuple[Tensor, Tensor, Tensor]:
    """Return (logprobs, old logprobs, advantages), each [K] float64; an advantage is all of its trajectory's."""
    generator = torch.Generator().manual_seed(seed)
    num = sum(COUNTS)
    old = -3.0 * torch.rand(num, generator=generator, dtype=torch.float64)
    logprobs = old + scale * torch.randn(num, generator=generator, dtype=torch.float64)
    advantages = torch.randn(len(COUNTS), generator=generator, dtype=torch.float64)
    return logprobs.requires_grad_(), old, advantages.repeat_interleave(torch.tensor(COUNTS))


def parts(*columns: Tensor) -> list[tuple[list[float], ...]]:
    """Return the columns cut into trajectories, as lists of numbers."""
    cut = [[part.tolist() for part in column.detach().split(list(COUNTS))] for column in columns]
    return list(zip(*cut, strict=True))
