"""A micro-batch: several trajectories concatenated, without padding, as the tensors that one forward pass takes.

Trajectories with one prompt share it: the first has it, and the others' segments begin after it.
Shapes: T tokens of all segments, K of them written by the model, S segments (trajectories).
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.models.varlen_attention import Segments
from protocol.settings.learner import MIN_SHARED_TOKENS


@dataclass(frozen=True)
class LearnerSample:
    """One trajectory for the learner."""

    tokens: NDArray[np.int32]  # [T]
    loss_mask: NDArray[np.bool_]  # [T], true where the model wrote the token
    behaviour_logprobs: NDArray[np.float32]  # [T], natural logs of the sampling engine; 0 where the mask is false
    advantage: float = 0.0  # of every token
    weights: NDArray[np.float32] | None = None  # [T], weight of each written token; None: all equal
    number: int = -1  # number in the step; -1: no step

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first one that the model wrote; all if it wrote none."""
        return int(self.loss_mask.argmax()) if self.loss_mask.any() else len(self.tokens)

    def weights_at(self, places: NDArray[np.int64]) -> NDArray[np.float32]:
        return np.ones(len(places), np.float32) if self.weights is None else self.weights[places]


@dataclass(frozen=True)
class MicroBatch:
    """Tensors of one forward pass."""

    tokens: Tensor  # [1, T] int64
    position_ids: Tensor  # [1, T] int64, places in the trajectories
    lengths: tuple[int, ...]  # [S] tokens of each segment
    prompts: tuple[tuple[int, int], ...]  # [S] (place, tokens) of the prompt that is in an earlier segment; or (0, 0)
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

    @property
    def segments(self) -> Segments:
        """The model's keyword, on the tokens' device. One object serves one forward pass."""
        return Segments(self.lengths, self.tokens.device, self.prompts)

    def split(self, of_tokens: Tensor) -> list[Tensor]:
        """Return what belongs to each trajectory's tokens, its prompt's first. of_tokens: [T, ..]."""
        own = torch.split(of_tokens, list(self.lengths))
        prompts = [of_tokens[start : start + number] for start, number in self.prompts]
        return [torch.cat(pair) if len(pair[0]) else pair[1] for pair in zip(prompts, own, strict=True)]

    def input_sum(self) -> Tensor:
        """Return a number that is not finite when an input of the loss is not."""
        total = self.behaviour_logprobs.sum() + self.advantages.sum() + self.weights.sum()
        for column in (self.old_logprobs, self.reference_logprobs, self.values, self.returns):
            if column is not None:
                total = total + column.sum()
        return total

    def to(self, device: torch.device) -> "MicroBatch":
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {name: v.to(device) for name, v in values.items() if isinstance(v, Tensor)}
        return replace(self, **moved)


def make_micro_batch(samples: Sequence[LearnerSample], *, share_prompts: bool = False) -> MicroBatch:
    """Return the samples concatenated on the CPU. share_prompts: equal prompts are computed once.

    No samples give a micro-batch of one token that predicts nothing: a rank without work still joins every collective.
    """
    if not samples:
        nothing = LearnerSample(np.zeros(1, np.int32), np.zeros(1, np.bool_), np.zeros(1, np.float32))
        return make_micro_batch([nothing])
    # In a micro-batch the token before a trajectory's first one is another trajectory's last.
    assert not any(s.loss_mask[0] for s in samples), "a trajectory's first token is its prompt's"
    pieces = _pieces(samples, share_prompts=share_prompts)
    ordered = [piece.sample for piece in pieces]
    lengths = [len(piece.sample.tokens) - piece.begin for piece in pieces]
    starts = np.cumsum([0, *lengths[:-1]])
    masked = [np.flatnonzero(s.loss_mask) for s in ordered]
    before = [piece.places(where - 1, start) for piece, where, start in zip(pieces, masked, starts, strict=True)]
    advantages = np.repeat([s.advantage for s in ordered], [len(where) for where in masked])
    return MicroBatch(
        tokens=_concatenate([piece.sample.tokens[piece.begin :] for piece in pieces], np.int64)[None],
        position_ids=_concatenate([np.arange(p.begin, len(p.sample.tokens)) for p in pieces], np.int64)[None],
        lengths=tuple(lengths),
        prompts=tuple((piece.source, piece.begin) for piece in pieces),
        counts=tuple(len(where) for where in masked),
        predict_at=_concatenate(before, np.int64),
        targets=_concatenate([s.tokens[where] for s, where in zip(ordered, masked, strict=True)], np.int64),
        behaviour_logprobs=_concatenate(
            [s.behaviour_logprobs[where] for s, where in zip(ordered, masked, strict=True)], np.float32
        ),
        advantages=_concatenate([advantages], np.float32),
        weights=_concatenate([s.weights_at(where) for s, where in zip(ordered, masked, strict=True)], np.float32),
        numbers=tuple(s.number for s in ordered),
    )


class _Piece(NamedTuple):
    """A trajectory's tokens from `begin` on. Those before are at `source` of the flat tokens."""

    sample: LearnerSample
    begin: int = 0
    source: int = 0

    def places(self, places: NDArray[np.int64], start: int) -> NDArray[np.int64]:
        """Return the flat places of places in the trajectory. start: flat place of the piece's first token."""
        return np.where(places < self.begin, self.source + places, start - self.begin + places)


def _pieces(samples: Sequence[LearnerSample], *, share_prompts: bool) -> list[_Piece]:
    """Return whole trajectories, longest first, then those whose prompt is in one of them, a prompt after the other."""
    by_prompt: dict[bytes | int, list[LearnerSample]] = {}
    for number, sample in enumerate(sorted(samples, key=lambda s: -len(s.tokens))):
        length = sample.prompt_length
        is_shared = share_prompts and MIN_SHARED_TOKENS <= length < len(sample.tokens)
        by_prompt.setdefault(sample.tokens[:length].tobytes() if is_shared else number, []).append(sample)
    sharers = list(by_prompt.values())
    starts = accumulate((len(first.tokens) for first, *_ in sharers), initial=0)
    others = [
        _Piece(each, each.prompt_length, at) for (_, *rest), at in zip(sharers, starts, strict=False) for each in rest
    ]
    return [*(_Piece(first) for first, *_ in sharers), *others]


def _concatenate(parts: Sequence[NDArray[np.generic]], dtype: type[np.generic]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(dtype))
