"""LoRA adapters inside a transformers model.

The model keeps its class and names. In an adapted layer, NAME.weight becomes NAME.base_layer.weight,
NAME.lora_A.default.weight and NAME.lora_B.default.weight. Source: LoRA, arXiv:2106.09685.
"""

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from learner.models.read_back import WrittenFiles
from protocol.errors import OperatorError
from protocol.weights.digest import digest_of_tensor

_ADAPTER = "default"
# Prefix of peft's names of an adapter's tensors on disk.
_DISK_PREFIX = "base_model.model."
CONFIG = "adapter_config.json"
_TENSORS = "adapter_model.safetensors"


@dataclass(frozen=True)
class LoraForm:
    """The form of a model's adapters. There is no dropout: it would change logprobs at random."""

    rank: int
    alpha: float  # numerator of the product's factor alpha / rank
    targets: tuple[str, ...]  # last parts of the adapted layers' names; empty: every linear layer but the head


def add_adapters(model: Any, form: LoraForm) -> None:
    """Add adapters to the model, and freeze everything else. Their product is zero at first.

    Raises: OperatorError when a target is no layer's name, when a layer is not linear (experts of a mixture), or when
    its weight is shared (a tied head).
    """
    from peft import inject_adapter_in_model

    targets = form.targets or _linear_names(model)
    layers = ", ".join(sorted({name.rpartition(".")[2] for name, each in model.named_modules() if _is_linear(each)}))
    try:
        if not targets:
            raise ValueError("it has no linear layer but its head (a Conv1D of GPT-2 is none)")
        _check_names(model, targets)
        _check_own_weights(model, targets)
        inject_adapter_in_model(_config(form, targets), model, adapter_name=_ADAPTER)
        _check_linear(model)
    except ValueError as error:
        given = list(form.targets) or f"[] (all linear layers but the head: {', '.join(targets) or 'none'})"
        raise OperatorError(
            f"policy.lora.targets = {given} cannot be adapted: {str(error).rstrip('.')}. This model's linear layers "
            f"are called {layers}. Name some of them in policy.lora.targets, or train all weights."
        ) from None
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)


@contextmanager
def adapters_off(model: Any) -> Iterator[None]:
    """Switch the adapters off within the block."""
    layers = list(adapted_layers(model).values())
    # peft's own switch would also change requires_grad, which DeepSpeed has recorded.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def adapted_layers(model: Any) -> dict[str, Any]:
    """Return the layers with an adapter, by name."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


def factors(layer: Any) -> tuple[Tensor, Tensor, float]:
    """Return (A [rank, inputs], B [outputs, rank], scale): an adapted layer's weight is base + scale * B @ A."""
    return layer.lora_A[_ADAPTER].weight, layer.lora_B[_ADAPTER].weight, float(layer.scaling[_ADAPTER])


def write_adapters(folder: Path, form: LoraForm, base: str, tensors: dict[str, Tensor]) -> WrittenFiles:
    """Write adapters in peft's form; returns the file with their tensors.

    base: the operator's name of the base model. tensors: lora_A and lora_B by their names in the model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    named = {_DISK_PREFIX + name.replace(f".{_ADAPTER}.", "."): tensor for name, tensor in tensors.items()}
    save_file(named, folder / _TENSORS, metadata={"format": "pt"})
    targets = {name.partition(".lora_")[0].rpartition(".")[2] for name in tensors}
    given = _config(form, targets).to_dict()
    config = {key: sorted(value) if isinstance(value, set) else value for key, value in given.items()}
    text = json.dumps({**config, "base_model_name_or_path": base}, indent=2, default=str)
    (folder / CONFIG).write_text(text + "\n", encoding="utf-8")
    return {folder / _TENSORS: {name: digest_of_tensor(name, tensor.contiguous()) for name, tensor in named.items()}}


def _config(form: LoraForm, targets: Collection[str]) -> Any:
    from peft import LoraConfig

    settings: dict[str, Any] = {"lora_alpha": form.alpha, "lora_dropout": 0.0, "bias": "none"}
    return LoraConfig(r=form.rank, target_modules=sorted(targets), **settings)


def _linear_names(model: Any) -> list[str]:
    """Return the last parts of the names of the model's linear layers, without the head.

    peft's "all-linear" includes experts and routers of mixtures, which cannot be merged for a push.
    """
    head = model.get_output_embeddings()
    layers = [name for name, module in model.named_modules() if _is_linear(module) and module is not head]
    return sorted({name.rpartition(".")[2] for name in layers})


def _check_linear(model: Any) -> None:
    """Raise ValueError when a layer that is not linear was adapted."""
    for name, layer in adapted_layers(model).items():
        if not _is_linear(layer.base_layer):
            raise ValueError(f"{name} is not a linear layer")


def _check_names(model: Any, targets: Collection[str]) -> None:
    """Raise ValueError for a target that no layer is called: peft ignores it when another one is there."""
    layers = [f".{name}" for name, _ in model.named_modules()]
    for target in targets:
        if not any(name.endswith(f".{target}") for name in layers):
            raise ValueError(f"no layer is called {target}")


def _check_own_weights(model: Any, targets: Collection[str]) -> None:
    """Raise ValueError for a target with a shared weight: merging would split it, and pushes have one copy."""
    owners = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, module in model.named_modules():
        is_target = any(f".{name}".endswith(f".{target}") for target in targets)
        if is_target and _is_linear(module) and (owner := owners[id(module.weight)]) != f"{name}.weight":
            raise ValueError(f"{name} has the weight of {owner}, which would stay without the adapter")


def _is_linear(module: Any) -> bool:
    return isinstance(module, torch.nn.Linear)
