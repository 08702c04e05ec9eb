"""Which parts of vLLM's merged parameters a push has not brought.

A part is one of q, k and v, or of gate and up, or of a mixture's experts.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

_EXPERT = re.compile(r"(?P<layer>(?:.+\.)?experts)\.(?P<number>\d+)\.(?P<kind>.+)")


def lacking_parts(model: Any, pushed: Collection[str]) -> set[str]:
    """Return what merged parameters still wait for, by the learner's names. Call it before the reload ends.

    vLLM takes a merged parameter for loaded once one part of it has come, and fills the rest with whatever was in
    memory: without this, such weights would be served as the pushed version. pushed: the names that the push brought.
    """
    merges: dict[str, Sequence[str]] = {}
    for module in model.modules():  # a model that also sees has those of its language model inside
        merges |= getattr(module, "packed_modules_mapping", None) or {}
    lacking: set[str] = set()
    for name, layer in model.named_modules():
        parent, _, merged = name.rpartition(".")
        if not isinstance(layer, MergedColumnParallelLinear | QKVParallelLinear) or merged not in merges:
            continue
        loading = get_layerwise_info(layer)
        if loading.can_load() and 0 < loading.load_numel < loading.load_numel_total:
            unseen = _unseen(layer, loading.loaded_weights, merges[merged])
            lacking |= {f"{parent}.{part}.{kind}" for part, kind in unseen}
    return lacking | _lacking_experts(model, pushed)


def _unseen(layer: Any, loaded: Sequence[tuple[str, Any]], names: Sequence[str]) -> set[tuple[str, str]]:
    """Return (part, kind) of what has not come of a layer, kind being weight or bias. loaded: vLLM's calls to load it.

    Names would not tell: a tower that sees has layers of the same numbers as the language model.
    """
    parts = ("q", "k", "v") if isinstance(layer, QKVParallelLinear) else tuple(range(len(layer.output_sizes)))
    if len(names) != len(parts):  # several parts under one name
        names = [str(part) for part in parts]
    seen: dict[str, set[Any]] = defaultdict(set)
    for kind, call in loaded:
        part = call.arguments.get("loaded_shard_id")
        if part is None:  # it came whole
            seen[kind] |= set(parts)
        else:
            seen[kind] |= set(part) if isinstance(part, tuple | list) else {part}
    return {
        (name, kind)
        for kind, found in seen.items()
        for name, part in zip(names, parts, strict=True)
        if part not in found
    }


def _lacking_experts(model: Any, pushed: Collection[str]) -> set[str]:
    """Return what an expert lacks that another one of its layer was brought. Experts that come as one have no numbers.

    How much of an expert's memory is loaded does not tell: some kernels want more of it than there are weights.
    """
    numbers = {layer.moe_config.num_logical_experts for layer in model.modules() if isinstance(layer, RoutedExperts)}
    brought: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for name in pushed if numbers else ():
        if (expert := _EXPERT.fullmatch(name)) is not None:
            brought[expert["layer"]][expert["kind"]].add(int(expert["number"]))
    lacking: set[str] = set()
    for layer, kinds in brought.items():
        wanted = set().union(*kinds.values(), range(min(numbers)))
        lacking |= {f"{layer}.{number}.{kind}" for kind, found in kinds.items() for number in wanted - found}
    return lacking
