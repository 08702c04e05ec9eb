"""A causal LM that returns log-probabilities in place of logits.

`make_scored` prepares any transformers model. Called with `scoring=Scoring(...)`, its output's `logits` are [1, K, 2]:
logprobs and entropies. Called without, the model is unchanged. There are two methods:

    head     hidden states -> logprobs inside the LM head, chunk by chunk: all logits never exist at once
    logits   the model's own logits [1, K, V] -> logprobs: correct for every model, and slower

The head method supports a bias, a tied weight, a scale and a softcap of the logits. The check of every start selects
the second for a model that changes its logits in another way.
Shapes: K tokens that are scored, H hidden size, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from learner.models.scoring.head_logprobs import HeadForm, head_logprobs

# Names of changes to logits: an attribute of Cohere's models, the others in the configuration.
_FACTOR = "logit_scale"
_DIVISOR = "logits_scaling"
_SOFTCAP = "final_logit_softcapping"

Method = Literal["head", "logits"]


@dataclass(frozen=True)
class Scoring:
    """The request of a forward pass that returns logprobs."""

    targets: Tensor  # [K] int64, a token for each position in logits_to_keep
    temperature: float  # sampling temperature; logprobs are those of the sampled distribution
    with_entropy: bool  # False: entropies are zeros


class ScoredModel:
    """The logprobs of one model: its method, and the hooks on its head. `scored_model` returns it."""

    def __init__(self, model: Any) -> None:
        head = model.get_output_embeddings()
        self._has_plain_head = type(head) is nn.Linear
        self.method: Method = "head" if self._has_plain_head else "logits"
        self._request: Scoring | None = None
        self._replaced: list[tuple[Any, str, Any]] = []  # (owner, attribute, own value) until `_end`
        if self.method == "head":
            self._plain_head = head.forward
            self._head = head
            # A forward pass still goes through the head's __call__: ZeRO 3 gathers its weight there.
            head.forward = self._head_forward
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        model.register_forward_hook(self._end, with_kwargs=True, always_call=True)
        model.scored = self

    def use(self, method: Method) -> None:
        """Use the method that the start's check has chosen. A head with adapters, which it does not see, has one."""
        self.method = method if self._has_plain_head else "logits"

    def _begin(self, model: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        self._request = kwargs.pop("scoring", None)
        if self._request is not None and self.method == "head":
            self._form = self._take_over(model)
        return args, kwargs

    def _end(self, model: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        request, self._request = self._request, None
        while self._replaced:
            setattr(*self._replaced.pop())
        if request is None or output is None:  # None: the forward pass raised
            return output
        if self.method == "logits":
            logits = output.logits[0]
            _check_number(len(logits), request)
            output.logits = scores_of(logits, request)[None]
        if output.logits.shape[-1] != 2 or output.logits.dtype != torch.float32:
            raise ValueError(f"the model turns its logprobs into {output.logits.dtype} {list(output.logits.shape)}")
        return output

    def _head_forward(self, hidden: Tensor) -> Tensor:
        request = self._request
        if request is None or self.method != "head":
            plain: Tensor = self._plain_head(hidden)
            return plain
        flat = hidden.view(-1, hidden.shape[-1])
        _check_number(len(flat), request)
        head, form = self._head, self._form
        return head_logprobs(flat, head.weight, head.bias, request.targets, form, with_entropy=request.with_entropy)[
            None
        ]

    def _take_over(self, model: Any) -> HeadForm:
        """Return the form of the model's head, and switch off its own code for logits until `_end`."""
        assert self._request is not None
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
        return HeadForm(self._request.temperature, scale, softcap)

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        self._replaced.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)


def scores_of(logits: Tensor, request: Scoring) -> Tensor:
    """Return [K, 2] float32, logprobs and entropies of logits [K, V]. Holds several tensors of [K, V] in float32."""
    scores = torch.log_softmax(logits.float() / request.temperature, -1)
    logprobs = scores.gather(1, request.targets[:, None])[:, 0]
    entropies = -(scores.exp() * scores).sum(-1) if request.with_entropy else torch.zeros_like(logprobs)
    return torch.stack([logprobs, entropies.detach()], -1)


def make_scored(model: Any) -> None:
    """Prepare a transformers causal LM."""
    ScoredModel(model)


def scored_model(model: Any) -> ScoredModel:
    """Return the scoring of a prepared model."""
    scored: ScoredModel = model.scored
    return scored


def _check_number(num_logits: int, request: Scoring) -> None:
    """Raise ValueError when the number of logits differs from the targets: they would be other tokens' logprobs."""
    expected = len(request.targets)
    if num_logits != expected:
        raise ValueError(f"the model returns logits for {num_logits} tokens, expected {expected}")
