"""Replaces a model's weights through vLLM's layerwise reload, and repairs the cases that vLLM gets wrong.

vLLM merges parameters (q, k and v; gate and up; experts), and takes a merged one for loaded once one part was loaded. A
push that lacks the other parts shows when the learner compares the server's logprobs with its own.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing
from vllm.platforms import current_platform

# It warns of a tied head at every push. `Reload.finish` names what a push lacks.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)


class Reload:
    """One replacement of all weights. Generation must be paused from the constructor to `finish` or `abort`.

    Example: reload = Reload(model, config); reload.load(bucket_1); reload.load(bucket_2); reload.finish()
    """

    def __init__(self, model: Any, model_config: Any) -> None:
        self._model, self._model_config = model, model_config
        self._loaded: set[str] = set()
        # The names are read before and after: a quantised layer has other parameters while it is reloaded, and a tied
        # parameter is sent under its first name only.
        names = {name for name, _ in model.named_parameters()}
        tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - names
        initialize_layerwise_reload(model)
        self._experts = _expert_places(model)
        self._required = {name for name, _ in model.named_parameters()} - tied

    def load(self, named: Sequence[tuple[str, Tensor]]) -> None:
        others: list[tuple[str, Tensor]] = []
        of_experts: dict[_Stack, dict[int, Tensor]] = {}
        for name, tensor in named:
            stack, expert = self._experts.get(name, (None, 0))
            if stack is None:
                others.append((name, tensor))
            else:
                of_experts.setdefault(stack, {})[expert] = tensor
        for stack, tensors in of_experts.items():
            self._loaded.add(stack.load(tensors))
        self._loaded |= self._model.load_weights(others) if others else set()

    def abort(self) -> None:
        """End a reload that failed. The weights are then a mixture and must not be served.

        Without this, vLLM would count the loaded parts of a layer towards the next push.
        """
        finalize_layerwise_reload(self._model, self._model_config)

    def finish(self) -> None:
        """Raises: ValueError naming parameters that the push lacked."""
        finalize_layerwise_reload(self._model, self._model_config)
        _pack_heads(self._model)
        if missing := self._required - self._loaded:
            raise ValueError(f"the push lacks {len(missing)} parameters of the model, first {sorted(missing)[:3]}")


class _Stack(NamedTuple):
    """One of the three weights of a layer's experts. vLLM takes a tenth of a millisecond to load one expert's."""

    layer: Any
    attribute: str  # vLLM's parameter
    name: str  # of the parameter in the model
    shard: str  # vLLM's name of the weight: w1, w2 or w3

    def load(self, tensors: Mapping[int, Tensor]) -> str:
        """Load the weights of experts by number, neighbours in one call; returns the parameter's name.

        This worker's shards are copied, so the received bucket can be freed.
        """
        parameter, config = getattr(self.layer, self.attribute), self.layer.moe_config
        dim = int(self.shard == "w2")
        numbers = sorted(tensors)
        starts = [0, *(i for i in range(1, len(numbers)) if numbers[i] != numbers[i - 1] + 1), len(numbers)]
        for begin, end in pairwise(starts):
            run = [tensors[number] for number in numbers[begin:end]]
            size = run[0].shape[dim] // config.tp_size
            shards = torch.stack([tensor.narrow(dim, size * config.tp_rank, size) for tensor in run])
            parameter.weight_loader(parameter, shards, self.name, self.shard, numbers[begin])
        return self.name


def _expert_places(model: Any) -> dict[str, tuple[_Stack, int]]:
    """Return (weight, expert) by the name in model folders, of the layers that take several experts in one call."""
    found = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, RoutedExperts) or type(layer.quant_method) is not UnquantizedFusedMoEMethod:
            continue
        mapping = layer.get_expert_mapping()
        if len(layer.w13_weight) != 1 + max(expert for _, _, expert, _ in mapping):
            continue  # with expert parallelism a worker has some of them
        for attribute in ("w13_weight", "w2_weight"):
            getattr(layer, attribute).weight_loader = _run_loader(layer)
        initialize_online_processing(layer)
        root = layer.layer_name.removesuffix("experts")
        for parameter, on_disk, expert, shard in mapping:
            attribute = parameter.removeprefix("experts.") + "weight"
            found[f"{root}{on_disk}weight"] = (_Stack(layer, attribute, f"{name}.{attribute}", shard), expert)
    return found


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


def _pack_heads(model: Any) -> None:
    """Pack the output heads again: for a tied head, vLLM's reload keeps the old packed weights (wrong by 2.6 nats)."""
    for head in model.modules():
        if isinstance(head, ParallelLMHead):
            head.quant_method.process_weights_after_loading(head)
