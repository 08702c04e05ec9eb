"""Whether a model computes each trajectory by itself, however trajectories are laid out in a micro-batch.

Attention is kept inside a trajectory by `varlen_attention`. Layers that carry a state along the tokens (linear
attention, Mamba, short convolutions), attention of a model's own, and dropout are not in its reach: they are found by
computing a few short texts in several ways, so that no list of models is needed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.models.micro_batch import LearnerSample, MicroBatch, make_micro_batch
from protocol.errors import OperatorError

# A leak moves logprobs by nats. bfloat16 rounds differently when shapes differ.
_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5}
_LENGTHS = (24, 17, 16)
_ALONE = "Set learner.micro_batch_tokens to 1: every trajectory is then computed by itself."
_OTHER_MODEL = "Use an architecture that the table of learner/models/README.md has as one that packs exactly."


@dataclass(frozen=True)
class Isolation:
    """Largest differences of a token's logprob, in nats, between two ways of computing it."""

    again: float  # the same texts twice
    causal: float  # a text, and the same text with more tokens after it
    packed: float  # a text alone, and the same text beside others in one micro-batch

    def complaint(self, dtype: str, *, is_packed: bool) -> str | None:
        """Return why the model cannot be trained, or None. is_packed: whether trajectories share a micro-batch."""
        limit = _TOLERANCE[dtype]
        if not self.again <= limit:
            return f"computes other logprobs each time (by {self.again:.2g} nats): something in it is drawn at random"
        if not self.causal <= limit:
            return (
                f"lets a token see later ones (by {self.causal:.2g} nats): its attention is its own and is not told "
                "what is causal"
            )
        if is_packed and not self.packed <= limit:
            return f"mixes trajectories that lie in one micro-batch (by {self.packed:.2g} nats)"
        return None


def measure_isolation(logprobs: Callable[[MicroBatch], Tensor], vocab_size: int) -> Isolation:
    """Return how far the ways of computing a few random texts differ. logprobs: micro-batch -> [K], without a gradient.

    Every rank computes the same texts: collective where `logprobs` is.
    """
    rng = np.random.default_rng(0)
    texts = [_text(rng.integers(0, vocab_size, length)) for length in _LENGTHS]

    def compute(*samples: LearnerSample) -> Tensor:
        return logprobs(make_micro_batch(samples)).float().cpu()

    packed, again = compute(*texts), compute(*texts)
    alone = [compute(text) for text in texts]
    beginning = compute(_text(texts[0].tokens[: _LENGTHS[-1]]))
    return Isolation(
        again=_difference(packed, again),
        causal=_difference(alone[0][: len(beginning)], beginning),
        packed=_difference(packed, torch.cat(alone)),
    )


def check_isolation(
    logprobs: Callable[[MicroBatch], Tensor], vocab_size: int, *, name: str, dtype: str, micro_batch_tokens: int
) -> None:
    """Raise unless the model computes each trajectory by itself. name: of the model, as the operator knows it.

    Raises: OperatorError with what to change.
    """
    try:
        found = measure_isolation(logprobs, vocab_size)
    except (ValueError, TypeError, KeyError, AttributeError, NotImplementedError) as error:
        raise _refusal(name, f"cannot take packed texts ({type(error).__name__}: {error})", _OTHER_MODEL) from error
    complaint = found.complaint(dtype, is_packed=micro_batch_tokens > 1)
    if complaint is not None:
        can_be_alone = found.complaint(dtype, is_packed=False) is None
        raise _refusal(name, complaint, _ALONE if can_be_alone else _OTHER_MODEL)


def _refusal(name: str, complaint: str, remedy: str) -> OperatorError:
    return OperatorError(f"The model {name} cannot be trained like this: it {complaint}. {remedy}")


def _text(tokens: NDArray[np.integer[Any]]) -> LearnerSample:
    mask = np.ones(len(tokens), np.bool_)
    mask[0] = False
    return LearnerSample(tokens.astype(np.int32), mask, np.zeros(len(tokens), np.float32))


def _difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())
