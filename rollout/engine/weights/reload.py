"""Loading a model's weights anew by vLLM's own layerwise reload, and what that leaves behind."""

from collections.abc import Collection
from typing import Any

from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import initialize_layerwise_reload


def begin_reload(model: Any) -> set[str]:
    """Have vLLM load all weights anew; returns the parameters that must come.

    They are not those that a quantised layer makes of its weights, and tied ones come under their first name alone.
    """
    names = {name for name, _ in model.named_parameters()}
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - names
    initialize_layerwise_reload(model)
    return {name for name, _ in model.named_parameters()} - tied


def let_experts_be_packed(model: Any) -> None:
    """Have vLLM pack the experts' weights for the CPU when they are loaded next.

    It does so when it makes their kernel, and leaves weights as they come that are loaded under a kernel: after a push
    every logprob of a mixture of experts would be wrong by nats, and no request would fail.
    """
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod):
            method.moe_kernel = None


def pack_heads(model: Any) -> None:
    """Pack the output heads anew. Of a tied one vLLM's reload leaves the packed copy of the embedding before.

    Every logprob would be wrong by up to nats, and no request would fail.
    """
    for head in model.modules():
        if isinstance(head, ParallelLMHead):
            head.quant_method.process_weights_after_loading(head)


def check_whole(missing: Collection[str]) -> None:
    """Raises: ValueError naming parameters that the push lacked: they would stay old without anyone noticing."""
    if missing:
        raise ValueError(f"the push lacks {len(missing)} parameters of the model, first {sorted(missing)[:3]}")
