"""Which parts of vLLM's merged parameters a push has not brought.

A part is one of q, k and v, or of gate and up, or of a mixture's experts.
"""

import re
from collections import defaultdict
from collections.abc import Collection
from typing import Any

from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

# layers.0.self_attn: what stands before it differs between vLLM's names and the learner's.
_NUM_KNOWN = 3
_EXPERT = re.compile(r"(?P<layer>.*experts)\.(?P<number>\d+)\.(?P<kind>.+)")


def lacking_parts(model: Any, pushed: Collection[str]) -> set[str]:
    """Return the parameters, by the learner's names, that a merged one still waits for. Call it before the reload ends.

    vLLM takes a merged parameter for loaded once one part of it has come, and fills the rest with whatever was in
    memory: without this, such weights would be served as the pushed version. pushed: the names that the push brought.
    """
    merges = getattr(model, "packed_modules_mapping", {})
    lacking: set[str] = set()
    for name, layer in model.named_modules():
        parent, _, merged = name.rpartition(".")
        if not isinstance(layer, MergedColumnParallelLinear | QKVParallelLinear) or merged not in merges:
            continue
        loading = get_layerwise_info(layer)
        if loading.can_load() and 0 < loading.load_numel < loading.load_numel_total:
            lacking |= _unseen(parent, merges[merged], [each for each, _ in layer.named_parameters()], pushed)
    return lacking | _lacking_experts(model, pushed)


def _unseen(parent: str, parts: Collection[str], kinds: Collection[str], pushed: Collection[str]) -> set[str]:
    """Return which of the parts' parameters are not among the pushed ones. kinds: weight, bias."""
    known = ".".join(parent.split(".")[-_NUM_KNOWN:])
    wanted = {f"{parent}.{part}.{kind}": f"{known}.{part}.{kind}" for part in parts for kind in kinds}
    return {name for name, ending in wanted.items() if not any(_ends(each, ending) for each in pushed)}


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


def _ends(name: str, ending: str) -> bool:
    return name == ending or name.endswith(f".{ending}")
