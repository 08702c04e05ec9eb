"""A model's weights by the names that its model folder has, whatever the model is like in memory.

In memory experts may be one tensor, and an adapted layer has two factors beside its weight; on disk, and in the engine
that reads model folders, there are experts one by one and merged weights.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from learner.models.weights.lora import adapted_layers, factors

_BASE_LAYER = ".base_layer."


@dataclass(frozen=True)
class Weight:
    """One weight of a model in memory, without what adapters change of its name."""

    name: str
    parts: tuple[Tensor, ...]  # what has to be whole together: the tensor, and its adapter's A and B where it has one
    scale: float = 0.0  # of B @ A
    is_buffer: bool = False  # what no gradient reaches: it keeps its type, whatever the parameters are computed in

    def merged(self, whole: Sequence[Tensor] | None = None) -> Tensor:
        """Return the weight, its adapter merged in, in its own type. whole: its parts, made whole elsewhere."""
        parts = self.parts if whole is None else whole
        base = parts[0].detach()
        if len(parts) == 1:
            return base
        _, a, b = (part.detach().float() for part in parts)
        return (base.float() + self.scale * (b @ a)).to(base.dtype)


def weights_of(model: Any) -> list[Weight]:
    """Return the weights of a model in its order, a tied head once, and what it keeps that no gradient reaches."""
    layers = adapted_layers(model)
    found = []
    for name, tensor in model.named_parameters():
        if ".lora_" in name:
            continue
        layer = layers.get(name.removesuffix(".weight").removesuffix(".base_layer"))
        if layer is not None and name.endswith(f"{_BASE_LAYER}weight"):
            a, b, scale = factors(layer)
            found.append(Weight(name.replace(_BASE_LAYER, "."), (tensor, a, b), scale))
        else:
            found.append(Weight(name.replace(_BASE_LAYER, "."), (tensor,)))
    kept = [Weight(name.replace(_BASE_LAYER, "."), (tensor,), is_buffer=True) for name, tensor in _kept_buffers(model)]
    return found + kept


def as_on_disk(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors under the names and in the shapes that model folders have: experts one by one, in memory one."""
    from transformers.core_model_loading import revert_weight_conversion

    parts: dict[str, Tensor] = revert_weight_conversion(model, dict(tensors))
    return parts


def shapes_on_disk(model: Any, weight: Weight, shape_of: Callable[[Tensor], tuple[int, ...]]) -> dict[str, Any]:
    """Return the shapes of what a weight is on disk, by name; nothing is gathered. shape_of: a tensor's whole shape."""
    pretended = torch.empty(shape_of(weight.parts[0]), dtype=weight.parts[0].dtype, device="meta")
    return {name: tuple(tensor.shape) for name, tensor in as_on_disk(model, {weight.name: pretended}).items()}


def _kept_buffers(model: Any) -> list[tuple[str, Tensor]]:
    """Return what a model keeps beside its parameters and cannot work out anew, such as the bias of a router."""
    kept = model.state_dict().keys()
    return [(name, buffer) for name, buffer in model.named_buffers() if name in kept]
