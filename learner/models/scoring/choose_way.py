"""Which way a model's log-probabilities take: through its head, or by its logits where the head is not all there is."""

import logging
from collections.abc import Callable

import numpy as np
from torch import Tensor

from learner.models.micro_batch import LearnerSample, MicroBatch, make_micro_batch
from learner.models.scoring.scored_model import ScoredModel
from protocol.errors import OperatorError

# The ways differ by rounding, or by nats where a model does something to its logits that the head does not know.
_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5}
_NUM_TOKENS = 24
_log = logging.getLogger(__name__)


def choose_way(scored: ScoredModel, logprobs: Callable[[MicroBatch], Tensor], *, name: str, dtype: str) -> None:
    """Have the model take the slower way, by its logits, where its head gives other logprobs; a log line says so.

    logprobs: micro-batch -> [K], without a gradient; collective where it is. name: of the model, as the operator knows
    it. Raises: OperatorError when learner.float32_head is asked of such a model.
    """
    problem = _problem(scored, logprobs, dtype)
    if problem is None:
        return
    if scored.has_float32_head:
        raise OperatorError(
            f"learner.float32_head = true cannot be had with the model {name}: {problem}, so that its own code "
            "computes the logits. Set learner.float32_head to false."
        )
    _log.warning('logprobs by logits  model=%s why="%s" consequence="more memory per micro-batch"', name, problem)


def _problem(scored: ScoredModel, logprobs: Callable[[MicroBatch], Tensor], dtype: str) -> str | None:
    if scored.way == "logits":
        return "its head is not a plain linear layer"
    texts = make_micro_batch([_text()])
    found = []
    try:
        found.append(logprobs(texts))
    except (ValueError, TypeError, LookupError, RuntimeError, AttributeError) as error:
        problem = f"its code after the head takes no logprobs ({type(error).__name__})"
    scored.way = "logits"
    found.append(logprobs(texts))
    if len(found) == 2:
        difference = float((found[0] - found[1]).abs().max())
        if difference <= _TOLERANCE[dtype]:
            scored.way = "head"
            return None
        problem = f"it does something to its logits that is not known here (logprobs differ by {difference:.2g} nats)"
    return problem


def _text() -> LearnerSample:
    tokens = np.arange(1, _NUM_TOKENS + 1, dtype=np.int32)
    return LearnerSample(tokens, np.arange(_NUM_TOKENS) > 0, np.zeros(_NUM_TOKENS, np.float32))
