"""The check that a model computes each trajectory by itself, in any layout of a micro-batch.

`varlen_attention` keeps attention inside a trajectory. It cannot reach layers with a state along the tokens (linear
attention, Mamba, short convolutions), a model's own attention, or dropout. The check computes a few short texts in
several ways, so no list of models is needed.
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

# A leak changes logprobs by nats. bfloat16 rounds differently for other shapes.
_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5}
_LENGTHS = (24, 17, 16)
_ALONE = "Set learner.micro_batch_tokens to 1: every trajectory is then computed by itself."
_OTHER_MODEL = "Use an architecture that packs exactly (table in learner/models/README.md)."


@dataclass(frozen=True)
class Isolation:
    """Largest differences of a token's logprob, in nats, between two ways of computing it."""

    again: float  # the same texts twice
    causal: float  # a text, and the same text with more tokens after it
    packed: float  # a text alone, and the same text with others in one micro-batch

    def find_fault(self, dtype: str, *, is_packed: bool) -> str | None:
        """Return the reason why the model cannot be trained, or None. is_packed: trajectories share a micro-batch."""
        limit = _TOLERANCE[dtype]
        if not self.again <= limit:
            return f"computes other logprobs each time (by {self.again:.2g} nats): a part of it is random"
        if not self.causal <= limit:
            return f"lets a token see later ones (by {self.causal:.2g} nats): its own attention ignores the causal mask"
        if is_packed and not self.packed <= limit:
            return f"mixes trajectories of one micro-batch (by {self.packed:.2g} nats)"
        return None


def measure_isolation(logprobs: Callable[[MicroBatch], Tensor], vocab_size: int) -> Isolation:
    """Return the differences between several ways of computing random texts. Collective where `logprobs` is.

    logprobs: micro-batch -> [K], without a gradient.
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
    """Check that the model computes each trajectory by itself. name: the operator's name of the model.

    Raises: OperatorError naming the setting to change.
    """
    try:
        found = measure_isolation(logprobs, vocab_size)
    except (ValueError, TypeError, KeyError, AttributeError, NotImplementedError) as error:
        raise _refusal(name, f"cannot take packed texts ({type(error).__name__}: {error})", _OTHER_MODEL) from error
    fault = found.find_fault(dtype, is_packed=micro_batch_tokens > 1)
    if fault is not None:
        can_be_alone = found.find_fault(dtype, is_packed=False) is None
        raise _refusal(name, fault, _ALONE if can_be_alone else _OTHER_MODEL)


def _refusal(name: str, fault: str, remedy: str) -> OperatorError:
    return OperatorError(f"The model {name} cannot be trained like this: it {fault}. {remedy}")


def _text(tokens: NDArray[np.integer[Any]]) -> LearnerSample:
    mask = np.ones(len(tokens), np.bool_)
    mask[0] = False
    return LearnerSample(tokens.astype(np.int32), mask, np.zeros(len(tokens), np.float32))


def _difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())
