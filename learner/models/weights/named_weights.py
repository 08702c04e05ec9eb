"""A model's weights by the names in its model folder.

In memory experts may be one tensor, and an adapted layer has a weight and two factors. Model folders, and engines that
read them, have separate experts and merged weights.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from learner.models.weights.lora import adapted_layers, factors

_BASE_LAYER = ".base_layer."


@dataclass(frozen=True)
class Weight:
    """One weight of a model in memory, under its name without adapters."""

    name: str
    parts: tuple[Tensor, ...]  # the tensor, and A and B of its adapter if it has one; gathered together
    scale: float = 0.0  # factor of B @ A
    is_buffer: bool = False  # it has no gradient and keeps its type

    def merge(self) -> Tensor:
        """Return the weight with its adapter merged in, in its own type. Its parts are gathered."""
        base = self.parts[0].detach()
        if len(self.parts) == 1:
            return base
        _, a, b = (part.detach().float() for part in self.parts)
        exact = base.float() + self.scale * (b @ a)
        return _dither(exact) if base.dtype == torch.bfloat16 else exact.to(base.dtype)


def _dither(exact: Tensor) -> Tensor:
    """Return float32 numbers in bfloat16, each rounded up with the probability of its distance from the lower one.

    The base is in bfloat16. To the nearest, a change below half a step is lost in every weight: servers would sample
    from the base until the adapters outgrow it. Each place always has the same threshold, so equal weights give equal
    digests.
    """
    draw = torch.Generator(exact.device).manual_seed(0)
    below = torch.randint(1 << 16, exact.shape, generator=draw, device=exact.device, dtype=torch.int32)
    # bfloat16 is the upper half of a float32. A carry out of the lower half is the next number away from 0.
    bits = (exact.view(torch.int32) + below) & ~0xFFFF
    return bits.view(torch.float32).to(torch.bfloat16)


def weights_of(model: Any) -> list[Weight]:
    """Return the weights of a model in its order, a tied head once, then its saved buffers."""
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
    kept = [Weight(name.replace(_BASE_LAYER, "."), (tensor,), is_buffer=True) for name, tensor in _saved_buffers(model)]
    return found + kept


def as_on_disk(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors under the names and in the shapes of model folders, which have separate experts."""
    from transformers.core_model_loading import revert_weight_conversion

    parts: dict[str, Tensor] = revert_weight_conversion(model, dict(tensors))
    return parts


def shapes_on_disk(model: Any, weight: Weight, shape_of: Callable[[Tensor], tuple[int, ...]]) -> dict[str, Any]:
    """Return a weight's shapes on disk by name; nothing is gathered. shape_of: returns a tensor's whole shape."""
    meta = torch.empty(shape_of(weight.parts[0]), dtype=weight.parts[0].dtype, device="meta")
    return {name: tuple(tensor.shape) for name, tensor in as_on_disk(model, {weight.name: meta}).items()}


def _saved_buffers(model: Any) -> list[tuple[str, Tensor]]:
    """Return the buffers that a model saves, such as the bias of a router."""
    kept = model.state_dict().keys()
    return [(name, buffer) for name, buffer in model.named_buffers() if name in kept]
