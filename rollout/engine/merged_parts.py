"""Which parts of vLLM's merged parameters a push has not brought. A part is one of q, k and v, or of gate and up."""

from collections.abc import Collection
from typing import Any

from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

# layers.0.self_attn: what stands before it differs between vLLM's names and the learner's.
_NUM_KNOWN = 3


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
    return lacking


def _unseen(parent: str, parts: Collection[str], kinds: Collection[str], pushed: Collection[str]) -> set[str]:
    """Return which of the parts' parameters are not among the pushed ones. kinds: weight, bias."""
    known = ".".join(parent.split(".")[-_NUM_KNOWN:])
    wanted = {f"{parent}.{part}.{kind}": f"{known}.{part}.{kind}" for part in parts for kind in kinds}
    return {name for name, ending in wanted.items() if not any(_ends(each, ending) for each in pushed)}


def _ends(name: str, ending: str) -> bool:
    return name == ending or name.endswith(f".{ending}")
