"""A model's twin: the same modules with weights of their own, where a version is made while another is in use."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO, _get_original_loader, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import sanitize_layer_refs
from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo
from vllm.v1.attention.backend import AttentionImplBase

_PLAIN_METHODS = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
_TENSORS = ("_parameters", "_buffers")
_OWN = (*_TENSORS, "_modules", "_non_persistent_buffers_set")  # containers that a module and its twin must not share


def can_have_twin(model: nn.Module) -> bool:
    """Return whether loading a twin leaves the model alone.

    It does where all that loading makes is the layer's own: not what a kernel object keeps that layers share (a
    mixture's experts, quantised layers, most attention over compressed keys). On a GPU captured graphs know where the
    weights lie, which must then be loaded there.
    """
    tensors = [*model.parameters(), *model.buffers()]
    return all(tensor.device.type == "cpu" for tensor in tensors) and all(map(_is_plain, model.modules()))


def _is_plain(layer: nn.Module) -> bool:
    if is_deferred_attention_layer(layer):
        after_loading = getattr(type(getattr(layer, "impl", None)), "process_weights_after_loading", None)
        is_shared = after_loading is not AttentionImplBase.process_weights_after_loading
        return isinstance(layer, Attention) and getattr(layer, "quant_method", None) is None and not is_shared
    method = getattr(layer, "quant_method", None)
    return method is None or type(method) in _PLAIN_METHODS


class Twin:
    """model: what vLLM's layerwise reload may load; nothing else may be done with it. Call order: hand_over, drop."""

    def __init__(self, model: nn.Module) -> None:
        self._made: dict[nn.Module, nn.Module] = {}
        self._given: dict[nn.Module, dict[str, Any]] = {}  # by twin: the attributes that it was given of its layer
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}  # by id: tied ones are one tensor in the twin too
        self.model: Any = self._twin_of(model)
        self._buffers = {name: id(buffer) for name, buffer in model.named_buffers()}

    @torch.no_grad()
    def hand_over(self, loaded: Collection[str]) -> None:
        """Give the model what loading made in the twin; what changed in the model's use meanwhile stays as it is.

        Tensors are copied into the model's, since others may be views of them (a Mamba layer's of its convolution).
        What became an attribute of a layer, its packed weights, which are most of a model, changes hands.
        loaded: the names that loading took, as the model has them.
        """
        left = {key for name, key in self._buffers.items() if name not in loaded}
        for key, (mine, twin) in self._tensors.items():
            if key not in left:
                mine.data.copy_(twin.data)
        for layer, copy in self._made.items():
            given = self._given[copy]
            for name in copy.__dict__.keys() - set(_OWN):
                made = copy.__dict__[name]
                if made is not given.get(name):
                    copy.__dict__[name], layer.__dict__[name] = layer.__dict__.get(name), made

    def drop(self) -> None:
        """Give the twin's memory back at once: its layers and their parameters refer to each other."""
        for twin in self._made.values():
            get_layerwise_info(twin).reset()
            del LAYERWISE_INFO[twin]
            twin.__dict__.clear()
        self._made, self._given, self._tensors = {}, {}, {}
        self.model = None

    def _twin_of(self, layer: nn.Module) -> nn.Module:
        if layer in self._made:
            return self._made[layer]
        twin = object.__new__(type(layer))
        self._made[layer] = twin
        self._given[twin] = layer.__dict__.copy()
        twin.__dict__.update(self._given[twin] | {name: layer.__dict__[name].copy() for name in _OWN})
        for name in _TENSORS:
            kept = twin.__dict__[name]
            for key, tensor in kept.items():
                kept[key] = None if tensor is None else self._tensor_of(tensor)
        for key, child in twin._modules.items():
            twin._modules[key] = None if child is None else self._twin_of(child)
        LAYERWISE_INFO[twin] = _as_recorded(layer)
        return twin

    def _tensor_of(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._tensors:
            twin: Any = tensor.data.clone()
            twin.__class__ = tensor.__class__
            twin.__dict__ = tensor.__dict__.copy()
            self._tensors[id(tensor)] = tensor, twin
        return self._tensors[id(tensor)][1]


def _as_recorded(layer: nn.Module) -> LayerReloadingInfo:
    """Return what vLLM recorded of a layer's weights as they are loaded, for its twin to be loaded by."""
    info = get_layerwise_info(layer)

    def unbound(tensor: Tensor) -> Tensor:
        copy = to_meta_tensor(tensor)
        if hasattr(copy, "weight_loader"):
            copy.weight_loader = _get_original_loader(copy)
        return cast(Tensor, sanitize_layer_refs(copy, layer))

    parameters, buffers = ({name: unbound(tensor) for name, tensor in kind.items()} for kind in info.restore_metadata)
    return LayerReloadingInfo(restore_metadata=(parameters, buffers), restore_device=torch.device("cpu"))
