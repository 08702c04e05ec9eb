"""Replaces a model's weights through vLLM's layerwise reload, and repairs the cases that vLLM gets wrong.

vLLM merges parameters (q, k and v; gate and up; experts), and takes a merged one for loaded once one part was loaded. A
push that lacks the other parts shows when the learner compares the server's logprobs with its own.

vLLM skips a tensor for which its model has no parameter, such as the output bias of a Qwen3 with attention_bias. A new
bias is 0, and a coarse type hides a small one, so the comparison would find it late: the first push finds it by name.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing
from vllm.platforms import current_platform

from protocol.weights.wire import Bucket, stacked_view

_NUMBER = re.compile(r"\d+")
# It warns of a tied head at every push. `Reload.finish` names what a push lacks.
_WARNS = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")


class Reload:
    """One replacement of all weights. Generation must be paused from the constructor to `finish` or `abort`.

    Example: reload = Reload(model, config); reload.load(bucket, flat) for each bucket; reload.finish()
    """

    def __init__(self, model: Any, model_config: Any) -> None:
        self._model, self._model_config = model, model_config
        self._loaded: set[str] = set()
        self._taken = _taken_kinds(model)
        self._skipped: dict[str, str] = {}  # kind of tensor -> one that vLLM skipped
        _WARNS.setLevel(logging.ERROR)  # here: an engine's start configures all of vLLM's logs again
        # The names are read before and after: a quantised layer has other parameters while it is reloaded, and a tied
        # parameter is sent under its first name only.
        names = {name for name, _ in model.named_parameters()}
        tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - names
        initialize_layerwise_reload(model)
        self._experts = _take_experts(model)
        self._required = {name for name, _ in model.named_parameters()} - tied

    def load(self, bucket: Bucket, flat: Tensor) -> None:
        """Load a bucket's tensors; neighbouring experts in one call."""
        others = []
        row = 0
        for place, metas in _runs(bucket, self._experts):
            tensors = stacked_view(flat, row, metas[0], len(metas))
            if place is None:
                others.append((metas[0].name, tensors[0]))
            else:
                self._loaded.add(place.stack.load(tensors, place.expert))
            row += sum(meta.num_rows for meta in metas)
        self._load_others(others)

    def abort(self) -> None:
        """End a reload that failed. The weights are then a mixture and must not be served.

        Without this, vLLM would count the loaded parts of a layer towards the next push.
        """
        finalize_layerwise_reload(self._model, self._model_config)

    def finish(self) -> None:
        """Raises: ValueError naming parameters that the push lacked, or tensors that the model computes without."""
        finalize_layerwise_reload(self._model, self._model_config)
        _pack_heads(self._model)
        if missing := self._required - self._loaded:
            raise ValueError(f"the push lacks {len(missing)} parameters of the model, first {sorted(missing)[:3]}")
        if skipped := [name for kind, name in self._skipped.items() if kind not in self._taken]:
            raise ValueError(
                f"vLLM's model has no parameter for {sorted(skipped)[:3]} and would compute without it. "
                "Use a model whose config does without it"
            )
        _check_routers(self._model)

    def _load_others(self, tensors: list[tuple[str, Tensor]]) -> None:
        """Load tensors by name. Those of a kind come alone until vLLM has taken one: its answer names no tensor."""
        known = []
        for name, tensor in tensors:
            kind = _NUMBER.sub("*", name)
            if kind in self._taken:
                known.append((name, tensor))
            elif loaded := self._model.load_weights([(name, tensor)]):
                self._taken.add(kind)
                self._loaded |= loaded
            else:
                self._skipped[kind] = name
        self._loaded |= self._model.load_weights(known) if known else set()


class _Stack(NamedTuple):
    """One of the three weights of a layer's experts. vLLM takes a tenth of a millisecond to load one expert's."""

    layer: Any
    attribute: str  # vLLM's parameter
    name: str  # of the parameter in the model
    shard: str  # vLLM's name of the weight: w1, w2 or w3

    def load(self, experts: Tensor, first: int) -> str:
        """Load the weights [N, ...] of consecutive experts; returns the parameter's name.

        This worker's shards are copied, so the received bucket can be freed.
        """
        parameter, config = getattr(self.layer, self.attribute), self.layer.moe_config
        dim = 1 + int(self.shard == "w2")
        size = experts.shape[dim] // config.tp_size
        shards = experts.narrow(dim, size * config.tp_rank, size).clone(memory_format=torch.contiguous_format)
        parameter.weight_loader(parameter, shards, self.name, self.shard, first)
        return self.name


class _Place(NamedTuple):
    stack: _Stack
    expert: int


def _runs(bucket: Bucket, places: Mapping[str, _Place]) -> Iterator[tuple[_Place | None, Bucket]]:
    """Yield the bucket's tensors in order: consecutive experts of one weight together, the others one by one."""
    begin = 0
    while begin < len(bucket):
        end, place = begin + 1, places.get(bucket[begin].name)
        while place and end < len(bucket) and places.get(bucket[end].name) == (place.stack, place.expert + end - begin):
            end += 1
        yield place, bucket[begin:end]
        begin = end


def _take_experts(model: Any) -> dict[str, _Place]:
    """Let the layers take several experts in one call; returns their places by the names in model folders."""
    layers, places = _expert_places(model)
    for layer in layers:
        for attribute in ("w13_weight", "w2_weight"):
            getattr(layer, attribute).weight_loader = _run_loader(layer)
        initialize_online_processing(layer)
    return places


@cache
def _expert_places(model: Any) -> tuple[list[Any], dict[str, _Place]]:
    """Return the layers that can take several experts in one call, and their weights' places. A model keeps them."""
    layers, found = [], {}
    for name, layer in model.named_modules():
        if not isinstance(layer, RoutedExperts) or type(layer.quant_method) is not UnquantizedFusedMoEMethod:
            continue
        mapping = layer.get_expert_mapping()
        if len(layer.w13_weight) != 1 + max(expert for _, _, expert, _ in mapping):
            continue  # with expert parallelism a worker has some of them
        layers.append(layer)
        root = layer.layer_name.removesuffix("experts")
        stacks: dict[tuple[str, str], _Stack] = {}
        for parameter, on_disk, expert, shard in mapping:
            attribute = parameter.removeprefix("experts.") + "weight"
            stack = stacks.setdefault((attribute, shard), _Stack(layer, attribute, f"{name}.{attribute}", shard))
            found[f"{root}{on_disk}weight"] = _Place(stack, expert)
    return layers, found


@cache
def _taken_kinds(model: Any) -> set[str]:
    """Return the kinds of tensors that vLLM has loaded so far, names with * for each number. A model keeps them."""
    del model
    return set()


def _run_loader(layer: Any) -> Any:
    """Return a weight loader of the layer that also takes shards of several experts [N, ...], the first's number."""

    def load(
        param: Tensor,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        if loaded_weight.dim() != 3:
            done: bool | None = layer.weight_loader(
                param, loaded_weight, weight_name, shard_id, expert_id, return_success
            )
            return done
        rows, rank = param.data[expert_id : expert_id + len(loaded_weight)], layer.moe_config.tp_rank
        if shard_id == "w2":
            layer._load_w2(rows, 2, loaded_weight, rank, load_full=True)
        else:
            layer._load_w13(rows, 1, shard_id, loaded_weight, rank, load_full=True)
        return True

    return load


def drop_expert_kernels(model: Any) -> None:
    """Make vLLM pack the experts' weights for the CPU during the next load.

    vLLM packs them only when it creates their kernel. With an existing kernel, all logprobs would be wrong by nats.
    """
    for layer in model.modules() if current_platform.is_cpu() else ():  # captured graphs keep a GPU's kernel
        method = getattr(layer, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod):
            method.moe_kernel = None


def _check_routers(model: Any) -> None:
    """Raise ValueError for a router whose bias vLLM ignores on CPUs: the tolerance of bfloat16 would hide it."""
    for name, module in model.named_modules():
        router = getattr(module, "router", None)
        if (
            isinstance(router, CPURouter)
            and router.e_score_correction_bias is not None
            and router.scoring_func == "softmax"
            and not router.use_grouped_topk
        ):
            raise ValueError(
                f"vLLM's model on a CPU computes {name} without the bias of its router, so it would choose other "
                "experts than the learner. Use rollout servers with GPUs, or another model"
            )


def _pack_heads(model: Any) -> None:
    """Pack the output heads again: for a tied head, vLLM's reload keeps the old packed weights (wrong by 2.6 nats)."""
    for head in model.modules():
        if isinstance(head, ParallelLMHead):
            head.quant_method.process_weights_after_loading(head)
