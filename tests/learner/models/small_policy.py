"""A step of a tiny policy: seven trajectories, a loss, settings; and whether two sets of weights are the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from learner.models.gradient import Sums
from learner.models.micro_batch import LearnerSample, MicroBatch
from learner.models.settings import PolicySettings
from tests.fakes.policy_settings import small_policy_settings

LENGTHS = (5, 31, 12, 12, 24, 40, 9)
VOCAB = 272
Loss = Callable[[Tensor, Tensor, MicroBatch], tuple[Tensor, Sums]]


def trajectories() -> list[LearnerSample]:
    """Return seven random trajectories with masked parts inside."""
    rng = np.random.default_rng(7)
    samples = []
    for length in LENGTHS:
        mask = rng.random(length) < 0.7
        mask[:2], mask[-1] = False, True
        samples.append(
            LearnerSample(
                rng.integers(0, VOCAB, length).astype(np.int32),
                mask,
                np.where(mask, rng.normal(-5.0, 0.5, length), 0.0).astype(np.float32),
                float(rng.normal()),
            )
        )
    return samples


def loss(logprobs: Tensor, entropies: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Sums]:
    ratio = (logprobs - micro_batch.behaviour_logprobs).clamp(-20.0, 20.0).exp()
    largest = ratio.detach().max() if len(ratio) else torch.zeros(())
    return -(ratio * micro_batch.advantages).sum(), {"entropy": entropies.sum(), "max_ratio": largest}


def settings(model: Path, zero_stage: Literal[0, 1, 2, 3]) -> PolicySettings:
    return small_policy_settings(
        model, zero_stage=zero_stage, weight_decay=0.01, warmup_steps=2, min_lr_ratio=0.1, schedule="linear"
    )


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)]).double()
