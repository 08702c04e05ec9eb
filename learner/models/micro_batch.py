"""A micro-batch: several trajectories concatenated, without padding, as the tensors that one forward pass takes.

Shapes: T tokens of all trajectories, K of them written by the model, S segments (trajectories).
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class LearnerSample:
    """One trajectory for the learner."""

    tokens: NDArray[np.int32]  # [T]
    loss_mask: NDArray[np.bool_]  # [T], true where the model wrote the token
    behaviour_logprobs: NDArray[np.float32]  # [T], natural logs of the sampling engine; 0 where the mask is false
    advantage: float = 0.0  # of every token
    weights: NDArray[np.float32] | None = None  # [T], weight of each written token; None: all equal
    number: int = -1  # number in the step; -1: no step


@dataclass(frozen=True)
class MicroBatch:
    """Tensors of one forward pass."""

    tokens: Tensor  # [1, T] int64
    position_ids: Tensor  # [1, T] int64, from 0 in each segment
    lengths: tuple[int, ...]  # [S] tokens of each segment, decreasing
    counts: tuple[int, ...]  # [S] number of model tokens of each; the sum is K
    predict_at: Tensor  # [K] int64, positions before the model tokens
    targets: Tensor  # [K] int64, the model tokens
    behaviour_logprobs: Tensor  # [K] float32, of the model tokens, as is all below
    advantages: Tensor  # [K] float32
    weights: Tensor  # [K] float32
    numbers: tuple[int, ...] = ()  # [S] number of each trajectory in its step; -1: no step
    staleness: tuple[int, ...] = ()  # [S] policy versions from its oldest token to the learner before the step
    # From before the step's first update; None: not needed
    old_logprobs: Tensor | None = None  # [K] float32
    reference_logprobs: Tensor | None = None  # [K] float32
    values: Tensor | None = None  # [K] float32, of the state before the token
    returns: Tensor | None = None  # [K] float32, targets of the critic

    @property
    def num_model_tokens(self) -> int:
        return int(self.targets.numel())

    def input_sum(self) -> Tensor:
        """Return a number that is not finite when an input of the loss is not."""
        total = self.behaviour_logprobs.sum() + self.advantages.sum() + self.weights.sum()
        for column in (self.old_logprobs, self.reference_logprobs, self.values, self.returns):
            if column is not None:
                total = total + column.sum()
        return total

    def to(self, device: torch.device) -> "MicroBatch":
        """Return the micro-batch on the device."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {name: v.to(device) for name, v in values.items() if isinstance(v, Tensor)}
        return replace(self, **moved)


def make_micro_batch(samples: Sequence[LearnerSample]) -> MicroBatch:
    """Return the samples concatenated, longest first, on the CPU.

    No samples give a micro-batch of one token that predicts nothing: a rank without work still joins every collective.
    """
    if not samples:
        nothing = LearnerSample(np.zeros(1, np.int32), np.zeros(1, np.bool_), np.zeros(1, np.float32))
        return make_micro_batch([nothing])
    ordered = sorted(samples, key=lambda s: -len(s.tokens))
    lengths = [len(s.tokens) for s in ordered]
    starts = np.cumsum([0, *lengths[:-1]])
    tokens = np.concatenate([s.tokens for s in ordered]).astype(np.int64)
    positions = np.concatenate([np.arange(n) for n in lengths])
    # In a micro-batch the token before a trajectory's first one is another trajectory's last.
    assert not any(s.loss_mask[0] for s in ordered), "a trajectory's first token is its prompt's"
    masked = [np.flatnonzero(s.loss_mask) for s in ordered]
    written = np.concatenate([start + where for start, where in zip(starts, masked, strict=True)]).astype(np.int64)
    behaviour = np.concatenate([s.behaviour_logprobs[where] for s, where in zip(ordered, masked, strict=True)])
    weights = np.concatenate(
        [
            np.ones(len(w), np.float32) if s.weights is None else s.weights[w]
            for s, w in zip(ordered, masked, strict=True)
        ]
    )
    advantages = np.repeat([s.advantage for s in ordered], [len(where) for where in masked]).astype(np.float32)
    return MicroBatch(
        tokens=_tensor(tokens)[None],
        position_ids=_tensor(positions)[None],
        lengths=tuple(lengths),
        counts=tuple(len(where) for where in masked),
        predict_at=_tensor(written - 1),
        targets=_tensor(tokens[written]),
        behaviour_logprobs=_tensor(behaviour.astype(np.float32)),
        advantages=_tensor(advantages),
        weights=_tensor(weights),
        numbers=tuple(s.number for s in ordered),
    )


def _tensor(array: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))
