"""Replaces a model's weights through vLLM's layerwise reload, and repairs the cases that vLLM gets wrong.

vLLM merges parameters (q, k and v; gate and up; experts), and takes a merged one for loaded once one part was loaded.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

_EXPERT = re.compile(r"(?P<layer>(?:.+\.)?experts)\.(?P<number>\d+)\.(?P<kind>.+)")


class Reload:
    """One replacement of all weights. Generation must be paused from the constructor to `finish` or `abort`.

    Example: reload = Reload(model, config); reload.load(bucket_1); reload.load(bucket_2); reload.finish()
    """

    def __init__(self, model: Any, model_config: Any) -> None:
        self._model, self._model_config = model, model_config
        self._pushed: list[str] = []
        self._loaded: set[str] = set()
        # The names are read before and after: a quantised layer has other parameters while it is reloaded, and a tied
        # parameter is sent under its first name only.
        names = {name for name, _ in model.named_parameters()}
        tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - names
        initialize_layerwise_reload(model)
        self._required = {name for name, _ in model.named_parameters()} - tied

    def load(self, named: Sequence[tuple[str, Tensor]]) -> None:
        self._pushed += [name for name, _ in named]
        self._loaded |= self._model.load_weights(list(named))

    def abort(self) -> None:
        """End a reload that failed. The weights are then a mixture and must not be served.

        Without this, vLLM would count the loaded parts of a layer towards the next push.
        """
        finalize_layerwise_reload(self._model, self._model_config)

    def finish(self) -> None:
        """Raises: ValueError naming parameters that the push lacked."""
        missing = missing_parts(self._model, self._pushed)
        finalize_layerwise_reload(self._model, self._model_config)
        _pack_heads(self._model)
        if missing := (self._required - self._loaded) | missing:
            raise ValueError(f"the push lacks {len(missing)} parameters of the model, first {sorted(missing)[:3]}")


def drop_expert_kernels(model: Any) -> None:
    """Make vLLM pack the experts' weights for the CPU during the next load.

    vLLM packs them only when it creates their kernel. With an existing kernel, all logprobs would be wrong by nats.
    """
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod):
            method.moe_kernel = None


def _pack_heads(model: Any) -> None:
    """Pack the output heads again: for a tied head, vLLM's reload keeps the old packed weights (wrong by 2.6 nats)."""
    for head in model.modules():
        if isinstance(head, ParallelLMHead):
            head.quant_method.process_weights_after_loading(head)


def missing_parts(model: Any, pushed: Collection[str]) -> set[str]:
    """Return the parts of merged parameters that were not loaded, by the learner's names. Call before the reload ends.

    vLLM fills such parts with uninitialised memory. pushed: names of all parameters in the push.
    """
    merges: dict[str, Sequence[str]] = {}
    for module in model.modules():  # a vision-language model has the mapping in its inner language model
        merges |= getattr(module, "packed_modules_mapping", None) or {}
    lacking: set[str] = set()
    for name, layer in model.named_modules():
        parent, _, merged = name.rpartition(".")
        if not isinstance(layer, MergedColumnParallelLinear | QKVParallelLinear) or merged not in merges:
            continue
        loading = get_layerwise_info(layer)
        if loading.can_load() and 0 < loading.load_numel < loading.load_numel_total:
            unloaded = _unloaded_parts(layer, loading.loaded_weights, merges[merged])
            lacking |= {f"{parent}.{part}.{kind}" for part, kind in unloaded}
    return lacking | _missing_experts(model, pushed)


def _unloaded_parts(layer: Any, loaded: Sequence[tuple[str, Any]], names: Sequence[str]) -> set[tuple[str, str]]:
    """Return (part, "weight" or "bias") for each part of the layer that was not loaded. loaded: vLLM's load calls."""
    parts = ("q", "k", "v") if isinstance(layer, QKVParallelLinear) else tuple(range(len(layer.output_sizes)))
    if len(names) != len(parts):  # several parts under one name
        names = [str(part) for part in parts]
    seen: dict[str, set[Any]] = defaultdict(set)
    for kind, call in loaded:
        part = call.arguments.get("loaded_shard_id")
        if part is None:  # the whole tensor in one call
            seen[kind] |= set(parts)
        else:
            seen[kind] |= set(part) if isinstance(part, tuple | list) else {part}
    return {
        (name, kind)
        for kind, found in seen.items()
        for name, part in zip(names, parts, strict=True)
        if part not in found
    }


def _missing_experts(model: Any, pushed: Collection[str]) -> set[str]:
    """Return the parameters that one expert lacks and another expert of its layer has.

    The number of loaded bytes cannot be compared: some kernels allocate more memory than there are weights.
    """
    numbers = {layer.moe_config.num_logical_experts for layer in model.modules() if isinstance(layer, RoutedExperts)}
    sent: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for name in pushed if numbers else ():
        if (expert := _EXPERT.fullmatch(name)) is not None:
            sent[expert["layer"]][expert["kind"]].add(int(expert["number"]))
    lacking: set[str] = set()
    for layer, kinds in sent.items():
        expected = set().union(*kinds.values(), range(min(numbers)))
        lacking |= {f"{layer}.{number}.{kind}" for kind, found in kinds.items() for number in expected - found}
    return lacking
