"""A causal LM that is asked for log-probabilities and answers with them in place of logits.

`make_scored` prepares any transformers model. Called with `scoring=Scoring(...)`, its output's `logits` are then
[1, K, 2]: logprobs and entropies; called without, it is the model that it was. Two ways lead there:

    head     hidden states -> logprobs inside the LM head, chunk by chunk: logits never exist together
    logits   the model's own logits [1, K, V] -> logprobs: right for every model, and slower

The head's way knows a bias, a tied weight, a scale and a softcap of the logits. `choose_way` compares both ways and has
a model that does more to its logits take the second.
Shapes: K tokens that are scored, H hidden size, V vocabulary.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from learner.models.micro_batch import LearnerSample, MicroBatch, make_micro_batch
from learner.models.scoring.head_logprobs import HeadForm, head_logprobs
from learner.models.scoring.logprobs import token_logprobs
from protocol.errors import OperatorError

# Where models keep what they do to their logits: Cohere's an attribute, the others in the configuration.
_FACTOR = "logit_scale"
_DIVISOR = "logits_scaling"
_SOFTCAP = "final_logit_softcapping"

Way = Literal["head", "logits"]


@dataclass(frozen=True)
class Scoring:
    """What is asked of a scored model's forward pass, beside its inputs."""

    targets: Tensor  # [K] int64, a token for each place that logits_to_keep names
    temperature: float  # of sampling; logprobs are those of the distribution that was sampled from
    with_entropy: bool  # False: zeros


class ScoredModel:
    """How one model answers; found again with `scored_model`."""

    def __init__(self, model: Any, *, float32_head: bool) -> None:
        head = model.get_output_embeddings()
        self.way: Way = "head" if type(head) is nn.Linear else "logits"
        self.has_float32_head = float32_head
        self._asked: Scoring | None = None
        self._own: list[tuple[Any, str, Any]] = []
        if self.way == "head":
            self._plain_head = head.forward
            self._head = head
            # A forward pass still goes through the head's __call__: ZeRO 3 gathers its weight there.
            head.forward = self._head_forward
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        model.register_forward_hook(self._end, with_kwargs=True, always_call=True)
        model.scored = self

    def _begin(self, model: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        self._asked = kwargs.pop("scoring", None)
        if self._asked is not None and self.way == "head":
            self._form = self._take_over(model)
        return args, kwargs

    def _end(self, model: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        asked, self._asked = self._asked, None
        while self._own:
            setattr(*self._own.pop())
        if asked is None or output is None:  # None: the forward pass raised
            return output
        if self.way == "logits":
            logits = output.logits[0]
            _check_number(len(logits), asked)
            scores = token_logprobs(logits, asked.targets, asked.temperature, with_entropy=asked.with_entropy)
            output.logits = torch.stack(scores, -1)[None]
        if output.logits.shape[-1] != 2 or output.logits.dtype != torch.float32:
            raise ValueError(f"the model makes {output.logits.dtype} {list(output.logits.shape)} of its logprobs")
        return output

    def _head_forward(self, hidden: Tensor) -> Tensor:
        asked = self._asked
        if asked is None or self.way != "head":
            plain: Tensor = self._plain_head(hidden)
            return plain
        flat = hidden.view(-1, hidden.shape[-1])
        _check_number(len(flat), asked)
        head, form = self._head, self._form
        return head_logprobs(flat, head.weight, head.bias, asked.targets, form, with_entropy=asked.with_entropy)[None]

    def _take_over(self, model: Any) -> HeadForm:
        """Return how the model makes logits, and have its own code do nothing more to them until `_end`."""
        assert self._asked is not None
        scale = 1.0
        if isinstance(factor := vars(model).get(_FACTOR), int | float):
            scale = float(factor)
            self._replace(model, _FACTOR, 1.0)
        if isinstance(divisor := getattr(model.config, _DIVISOR, None), int | float):
            scale /= divisor
            self._replace(model.config, _DIVISOR, 1.0)
        softcap = getattr(model.config, _SOFTCAP, None)
        if softcap is not None:
            self._replace(model.config, _SOFTCAP, None)
        return HeadForm(self._asked.temperature, scale, softcap, self.has_float32_head)

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        self._own.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)


def make_scored(model: Any, *, float32_head: bool = False) -> None:
    """Prepare a transformers causal LM. float32_head: the head's products are computed in float32, where `head` is."""
    ScoredModel(model, float32_head=float32_head)


def scored_model(model: Any) -> ScoredModel:
    """Return how a prepared model answers."""
    scored: ScoredModel = model.scored
    return scored


def _check_number(found: int, asked: Scoring) -> None:
    """Raise ValueError when logits are of other tokens than asked for: in order, they would be other tokens' logprobs
    wherever a prompt stands before them."""
    if found != len(asked.targets):
        wanted = len(asked.targets)
        raise ValueError(f"the model gives logits for {found} tokens where logits_to_keep names {wanted}")


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
