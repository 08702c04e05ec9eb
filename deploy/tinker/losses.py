"""Tinker's public losses: sums over tokens, never means.

Shape: K tokens of a micro-batch, flat. Logprobs are natural logs. A is the advantage, r the ratio learner / sampler.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from deploy.tinker.wire import Datum, Pass, RequestError
from learner.models.micro_batch import MicroBatch

TARGETS = "target_tokens"


@dataclass(frozen=True)
class Loss:
    """One loss."""

    of_tokens: Callable[[Tensor, MicroBatch, Mapping[str, float]], Tensor]  # (logprobs [K], ...) -> losses [K]
    inputs: tuple[str, ...]  # arrays that a datum must have, with its targets
    optional: tuple[str, ...] = ()  # arrays that it may have
    constants: dict[str, float] = field(default_factory=dict)  # constants with their defaults


def cross_entropy(logprobs: Tensor, batch: MicroBatch, constants: Mapping[str, float]) -> Tensor:
    """-w logp."""
    return -batch.weights * logprobs


def importance_sampling(logprobs: Tensor, batch: MicroBatch, constants: Mapping[str, float]) -> Tensor:
    """-r A."""
    return -_ratio(logprobs, batch) * batch.advantages


def ppo(logprobs: Tensor, batch: MicroBatch, constants: Mapping[str, float]) -> Tensor:
    """-min(r A, clip(r) A). Source: arXiv:1707.06347, eq. 7."""
    ratio = _ratio(logprobs, batch)
    return -torch.minimum(ratio * batch.advantages, _clip(ratio, constants) * batch.advantages)


def cispo(logprobs: Tensor, batch: MicroBatch, constants: Mapping[str, float]) -> Tensor:
    """-clip(r) A logp, with no gradient through r. Source: arXiv:2506.13585, eq. 4."""
    ratio = _clip(_ratio(logprobs.detach(), batch), constants)
    return -ratio * batch.advantages * logprobs


def dro(logprobs: Tensor, batch: MicroBatch, constants: Mapping[str, float]) -> Tensor:
    """-(logp A - beta / 2 (log r)^2). Source: arXiv:2405.19107, with the advantage in place of reward and value."""
    log_ratio = logprobs - batch.behaviour_logprobs
    return -(logprobs * batch.advantages - 0.5 * constants["beta"] * log_ratio.square())


_OF_SAMPLES = ("logprobs", "advantages")
_BOUNDS = ("clip_low_threshold", "clip_high_threshold")
LOSSES = {
    "cross_entropy": Loss(cross_entropy, (), ("weights",)),
    "importance_sampling": Loss(importance_sampling, _OF_SAMPLES),
    "ppo": Loss(ppo, _OF_SAMPLES, constants=dict(zip(_BOUNDS, (0.8, 1.2), strict=True))),
    "cispo": Loss(cispo, _OF_SAMPLES, constants=dict(zip(_BOUNDS, (0.0, 4.0), strict=True))),
    "dro": Loss(dro, _OF_SAMPLES, constants={"beta": 0.05}),
}


def loss_of(request: Pass, vocab_size: int, max_tokens: int) -> tuple[Loss, dict[str, float]]:
    """Return a request's loss and its constants.

    Raises: RequestError for a loss that is not served, and for data that does not fit it or the model.
    """
    loss = LOSSES.get(request.loss_fn)
    if loss is None:
        why = "its formula is not published" if request.loss_fn == "stable_reinforce" else "it is not known here"
        raise RequestError(
            f"loss_fn = {request.loss_fn} is not served: {why}. Use one of {', '.join(LOSSES)}; a recipe of "
            "tinker-cookbook takes loss_fn=importance_sampling on its command line."
        )
    constants = dict(loss.constants)
    for name, value in request.config.items():
        if name not in constants or isinstance(value, str):
            known = ", ".join(constants) or "none"
            raise RequestError(f"loss_fn_config.{name} = {value} is not served with {request.loss_fn}. Known: {known}.")
        constants[name] = value
    if _BOUNDS[0] in constants and not constants[_BOUNDS[0]] <= constants[_BOUNDS[1]]:
        raise RequestError(f"loss_fn_config = {constants}. {_BOUNDS[0]} must be at most {_BOUNDS[1]}.")
    for number, datum in enumerate(request.data):
        _check(f"data[{number}]", datum, loss, vocab_size, max_tokens)
    return loss, constants


def _check(where: str, datum: Datum, loss: Loss, vocab_size: int, max_tokens: int) -> None:
    count = len(datum.tokens)
    if not 1 <= count <= max_tokens:
        raise RequestError(f"{where} has {count} tokens. Give 1 to {max_tokens}, or start with a larger --max-tokens.")
    needed = {TARGETS, *loss.inputs}
    allowed = needed | {*loss.optional}
    if not needed <= datum.inputs.keys() <= allowed:
        raise RequestError(
            f"{where} has the inputs {', '.join(sorted(datum.inputs))}. Give {', '.join(sorted(allowed))}."
        )
    for name, array in datum.inputs.items():
        if array.shape != (count,):
            raise RequestError(
                f"{where}.{name} has the shape {list(array.shape)}. Give [{count}], one number for each token."
            )
    for tokens in (datum.tokens, datum.inputs[TARGETS]):
        if tokens.dtype.kind != "i" or np.any((tokens < 0) | (tokens >= vocab_size)):
            raise RequestError(
                f"{where} has a token outside 0 to {vocab_size - 1}. Use the tokenizer of the base model."
            )


def _ratio(logprobs: Tensor, batch: MicroBatch) -> Tensor:
    return (logprobs - batch.behaviour_logprobs).exp()


def _clip(ratio: Tensor, constants: Mapping[str, float]) -> Tensor:
    return ratio.clamp(*(constants[name] for name in _BOUNDS))
