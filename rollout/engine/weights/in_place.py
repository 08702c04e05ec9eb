"""Loading a push into the weights in use, bucket by bucket, while generation stands still."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

from protocol.weights.wire import Bucket, bucket_views, read_update_message
from rollout.engine.weights.known_shapes import KnownShapes
from rollout.engine.weights.merged_parts import lacking_parts
from rollout.engine.weights.messages import WeightUpdate
from rollout.engine.weights.received_push import ReceivedPush
from rollout.engine.weights.reload import begin_reload, check_whole, pack_heads


class InPlaceLoad:
    """Loads buckets into a model as they come, while generation stands still; two of them are in memory at a time.

    A push that breaks leaves mixed weights, which are not served.
    """

    def __init__(self) -> None:
        self._received = ReceivedPush()
        self._loaded: set[str] = set()
        self._wanted: set[str] = set()  # what a push must bring
        self._known = KnownShapes()
        self._plan: Sequence[Bucket] = ()

    def begin(self, model: Any, model_config: Any) -> None:
        self._model, self._model_config = model, model_config
        self._received, self._loaded = ReceivedPush(), set()
        self._wanted = begin_reload(model)

    def take(self, update: WeightUpdate, device: str | torch.device, broadcast: Callable[[torch.Tensor], None]) -> None:
        """Load a push's buckets, or compare their digest with the one expected."""
        try:
            if update.expected_digest is not None:
                self._received.confirm(update.expected_digest)
                return
            self._plan = read_update_message(update.message)
            self._known.check(self._plan)
            for bucket, flat in self._received.buckets(self._plan, device, broadcast):
                self._loaded |= self._model.load_weights(list(bucket_views(flat, bucket)))
        except BaseException:
            # vLLM would count what this push brought of a layer as the next one's, and take the layer for whole before
            # that has come: old and new weights would be served as one version.
            finalize_layerwise_reload(self._model, self._model_config)
            raise

    def end(self) -> None:
        if not self._received.is_confirmed:
            raise RuntimeError("weight commit before the digest was confirmed")
        lacking = lacking_parts(self._model, [meta.name for bucket in self._plan for meta in bucket])
        finalize_layerwise_reload(self._model, self._model_config)
        self._received = ReceivedPush()
        pack_heads(self._model)
        check_whole((self._wanted - self._loaded) | lacking)
        self._known.keep(self._plan)
