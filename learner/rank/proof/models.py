"""The models of a checkpoint, built from its files as a resume builds them, and asked what the ranks' were asked."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from learner.checkpoint.told import Told
from learner.models.critic import load_value_model
from learner.models.gradient import score_tokens
from learner.models.micro_batch import MicroBatch
from learner.models.model_loading import load_model
from learner.models.scoring.choose_way import choose_way
from learner.models.scoring.scored_model import scored_model
from learner.models.settings import PolicySettings
from learner.models.weights.digested import digest_of_folder, digest_of_model, folder_tensors, pushed_tensors
from learner.models.weights.lora import adapter_tensors
from learner.rank.proof.kept_texts import LOSS_TOLERANCE, answers
from learner.rank.proof.refused import NotProvableError, RefusedError
from learner.rank.proof.state_files import check_state
from protocol.errors import OperatorError

# A rank's GPU and this CPU merge an adapter with other rounding: by this share of the largest weight at most.
_MERGE_TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}


def check_policy(folder: Path, told: Told, settings: PolicySettings) -> float:
    """Return the loss of the kept texts by the policy in the files.

    Raises: RefusedError when its weights are not those that the servers hold, or its loss is not the ranks'.
    """
    with _of_the_run(settings.model_dir):
        policy = _Policy(settings)
    check_state(folder / "state" / "policy", "policy", told.models["policy"], putting(policy.model))
    _check_config(folder / "model", settings.model_dir)
    if digest_of_folder(folder / "model") != told.pushed:
        raise RefusedError("the weights in model/ are not those that the servers hold")
    if settings.lora is None:
        if digest_of_model(policy.model, settings.dtype) != told.pushed:
            raise RefusedError("the policy that its state makes is not the one that the servers hold")
    else:
        _check_merged(policy.model, folder / "model", settings.dtype)
    choose_way(scored_model(policy.model), policy.logprobs, name="the checkpoint", dtype=settings.dtype)
    said = told.models["policy"].answers
    return _check_loss("policy", answers(policy.logprobs, told.texts), said, settings.dtype)


def check_critic(folder: Path, told: Told, settings: PolicySettings) -> None:
    """Raise RefusedError when the critic in the files is not the ranks', or values the kept texts otherwise."""
    with _of_the_run(settings.model_dir):
        model = load_value_model(settings)
    check_state(folder, "critic", told.models["critic"], putting(model))
    with torch.no_grad():
        _check_loss("critic", answers(model, told.texts), told.models["critic"].answers, settings.dtype)


@contextmanager
def _of_the_run(folder: Path) -> Iterator[None]:
    """Turn what goes wrong with a model folder beside the checkpoint into NotProvableError."""
    try:
        yield
    except (OSError, ValueError, KeyError, SafetensorError, OperatorError) as error:
        why = " ".join(str(error).split())
        raise NotProvableError(f"the model in {folder}, which the run began with, cannot be loaded: {why}") from error


def putting(model: Any) -> Callable[[str, Tensor], None]:
    """Return what puts a weight into the model's parameter of that name, in the parameter's type."""
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}

    def put(name: str, weight: Tensor) -> None:
        with torch.no_grad():
            parameters[name].copy_(weight)

    return put


class _Policy:
    """A language model on the CPU that answers as `learner.models.gradient` asks."""

    device = torch.device("cpu")

    def __init__(self, settings: PolicySettings) -> None:
        self.model = load_model(settings)
        for parameter in self.model.parameters():
            if parameter.requires_grad:  # adapters may be made in another type than the one they are trained in
                parameter.data = parameter.data.to(getattr(torch, settings.dtype))

    @torch.no_grad()
    def logprobs(self, micro_batch: MicroBatch) -> Tensor:
        """Return the model tokens' logprobs at temperature 1, float32 [K]."""
        return score_tokens(self, micro_batch, 1.0, with_entropy=False)[0]

    def __call__(self, **inputs: Any) -> Any:
        return self.model(**inputs)

    def backward(self, loss: Tensor) -> None:
        raise RuntimeError("nothing is trained in a proof")


def _check_loss(role: str, found: Sequence[float], told: Sequence[float], dtype: str) -> float:
    """Return the mean of what is found, negative: of logprobs it is the loss."""
    loss, expected = -sum(found) / len(found), -sum(told) / len(told)
    limit = LOSS_TOLERANCE[dtype] * (1.0 if role == "policy" else max(1.0, abs(expected)))
    if len(found) != len(told) or not abs(loss - expected) <= limit:  # a NaN is no match either
        raise RefusedError(
            f"the {role} in its files computes {loss:.6g} on the kept texts, the ranks computed {expected:.6g}"
        )
    return loss


def _check_merged(model: Any, folder: Path, dtype: str) -> None:
    """Raise unless base and adapters make the weights in model/, and its adapter/ holds these adapters."""
    exported = dict(folder_tensors(folder))
    for name, tensor in pushed_tensors(model, dtype):
        difference = (exported[name].float() - tensor.float()).abs().max()
        if not difference <= _MERGE_TOLERANCE[dtype] * tensor.float().abs().max():
            raise RefusedError(f"{name} in model/ is not what the base model and the adapters in its state make")
    held, written = adapter_tensors(model), load_file(folder / "adapter" / "adapter_model.safetensors")
    if held.keys() != written.keys() or any(not torch.equal(held[name], written[name]) for name in held):
        raise RefusedError("the adapters in model/adapter/ are not those in its state")


def _check_config(folder: Path, source: Path) -> None:
    """Raise unless the exported folder describes the same model and tokenizer; the weights' type may be another."""
    if _described(folder) != _described(source):
        raise RefusedError("model/ describes another model or tokenizer than the run began with")


def _described(folder: Path) -> tuple[dict[str, Any], bytes]:
    config = json.loads((folder / "config.json").read_bytes())
    tokenizer = folder / "tokenizer.json"
    without_type = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")}
    return without_type, tokenizer.read_bytes() if tokenizer.is_file() else b""
