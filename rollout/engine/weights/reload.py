"""Replaces a model's weights through vLLM's layerwise reload, and repairs the cases that vLLM gets wrong.

vLLM merges parameters (q, k and v; gate and up; experts), and takes a merged one for loaded once one part was loaded. A
push that lacks the other parts shows when the learner compares the server's logprobs with its own.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
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
        self._required = {name for name, _ in model.named_parameters()} - tied

    def load(self, named: Sequence[tuple[str, Tensor]]) -> None:
        self._loaded |= self._model.load_weights(list(named))

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
