"""A micro-batch: several trajectories laid end to end, without padding, as the tensors that one forward pass takes.

Made by `learner.objectives.policy_gradient` and `learner.objectives.supervised`; read by `learner.models.policy` and
`learner.models.varlen_attention`. Shapes: T tokens of all trajectories, K of them written by the model, S segments
(trajectories).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class Sample:
    """One trajectory as the learner sees it.

    tokens: [T] int. loss_mask: [T] bool, true where the model wrote the token. behaviour_logprobs: [T] float32, 0
    elsewhere. advantage: of every token. weights: [T] float32, what each written token counts; None: all the same.
    """

    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    behaviour_logprobs: NDArray[np.float32]
    advantage: float = 0.0
    weights: NDArray[np.float32] | None = None


@dataclass(frozen=True)
class MicroBatch:
    """tokens, position_ids: [1, T]. lengths: of the segments, decreasing.

    predict_at: [K], the positions whose next token the model wrote.
    targets, behaviour_logprobs, advantages, weights: [K], of that next token.
    """

    tokens: Tensor
    position_ids: Tensor
    lengths: tuple[int, ...]
    predict_at: Tensor
    targets: Tensor
    behaviour_logprobs: Tensor
    advantages: Tensor
    weights: Tensor

    @property
    def num_model_tokens(self) -> int:
        return int(self.targets.numel())


def make_micro_batch(samples: Sequence[Sample], device: torch.device | str = "cpu") -> MicroBatch:
    """Return the samples laid end to end, longest first.

    No samples give a micro-batch of one token that predicts nothing: a rank without work still joins every collective.
    """
    if not samples:
        return make_micro_batch([Sample(np.zeros(1, np.int32), np.zeros(1, np.bool_), np.zeros(1, np.float32))], device)
    ordered = sorted(samples, key=lambda s: -len(s.tokens))
    lengths = [len(s.tokens) for s in ordered]
    starts = np.cumsum([0, *lengths[:-1]])
    tokens = np.concatenate([s.tokens for s in ordered]).astype(np.int64)
    positions = np.concatenate([np.arange(n) for n in lengths])
    # The first token of a trajectory is predicted by nothing: it is always prompt.
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

    def tensor(array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    return MicroBatch(
        tokens=tensor(tokens)[None],
        position_ids=tensor(positions)[None],
        lengths=tuple(lengths),
        predict_at=tensor(written - 1),
        targets=tensor(tokens[written]),
        behaviour_logprobs=tensor(behaviour.astype(np.float32)),
        advantages=tensor(advantages),
        weights=tensor(weights),
    )
