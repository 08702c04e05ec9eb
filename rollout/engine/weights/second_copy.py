"""Where the weights of a push go that comes while the ones before it are in use."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

from protocol.weights.wire import Bucket, bucket_num_bytes, bucket_views
from rollout.engine.weights.merged_parts import lacking_parts
from rollout.engine.weights.reload import begin_reload, check_whole, let_experts_be_packed, pack_heads
from rollout.engine.weights.twin import Twin, can_have_twin

# Of less, loading is some tens of milliseconds of Python, which hold generation up for longer than a pause would:
# of 3M parameters, 64 requests wrote 0.88 of what they write beside plain transfers, and 0.95 to 1.03 with the pause.
_LARGE_BYTES = 64 << 20


class SecondCopy(Protocol):
    """Call order: take for every bucket, complete; then put_to_use, or not. drop at the end, whatever came before."""

    def take(self, bucket: Bucket, flat: Tensor) -> None:
        """Take one of the push's buckets. flat: its bytes, uint8, which are the copy's from now on."""

    def complete(self) -> None:
        """Do what can be done before the weights in use are touched."""

    def put_to_use(self) -> None:
        """Make these weights the model's. Raises: ValueError naming what the push lacked; vLLM's refusals."""

    def drop(self) -> None:
        """Give the memory back."""


def second_copy(model: Any, model_config: Any, plan: Sequence[Bucket]) -> SecondCopy:
    """Return what takes a push of this plan."""
    is_large = sum(map(bucket_num_bytes, plan)) >= _LARGE_BYTES
    return (ReadyCopy if is_large and can_have_twin(model) else BytesCopy)(model, model_config)


class ReadyCopy:
    """Loads a push into a twin of the model as it comes: little is left to be done when it is put to use.

    What vLLM refuses to load is told when it is put to use: until then the rest of the push is received all the same,
    for which the learner would wait, and a digest that differs says more.
    """

    def __init__(self, model: Any, model_config: Any) -> None:
        self._twin = Twin(model)
        self._model_config = model_config
        self._wanted = begin_reload(self._twin.model)
        self._came: list[str] = []
        self._loaded: set[str] = set()
        self._refusal: Exception | None = None

    @torch.no_grad()
    def take(self, bucket: Bucket, flat: Tensor) -> None:
        self._came += [meta.name for meta in bucket]
        if self._refusal is None:
            try:
                self._loaded |= self._twin.model.load_weights(list(bucket_views(flat, bucket)))
            except Exception as error:
                self._refusal = error
        del flat
        _trim_heap()

    @torch.no_grad()
    def complete(self) -> None:
        if self._refusal is None:
            try:
                self._finish()
            except Exception as error:
                self._refusal = error

    def put_to_use(self) -> None:
        if self._refusal is not None:
            raise self._refusal
        self._twin.hand_over(self._loaded)

    def drop(self) -> None:
        self._twin.drop()
        _trim_heap()

    def _finish(self) -> None:
        model = self._twin.model
        lacking = lacking_parts(model, self._came)
        finalize_layerwise_reload(model, self._model_config)
        check_whole((self._wanted - self._loaded) | lacking)
        pack_heads(model)


class BytesCopy:
    """Keeps a push's bytes, and has vLLM load them when they are put to use: small models, and where no twin can be."""

    def __init__(self, model: Any, model_config: Any) -> None:
        self._model, self._model_config = model, model_config
        self._named: list[tuple[str, Tensor]] = []

    def take(self, bucket: Bucket, flat: Tensor) -> None:
        self._named += bucket_views(flat, bucket)

    def complete(self) -> None:
        pass

    def put_to_use(self) -> None:
        let_experts_be_packed(self._model)
        wanted = begin_reload(self._model)
        try:
            loaded = self._model.load_weights(self._named)
            lacking = lacking_parts(self._model, [name for name, _ in self._named])
        finally:
            finalize_layerwise_reload(self._model, self._model_config)
        pack_heads(self._model)
        check_whole((wanted - loaded) | lacking)

    def drop(self) -> None:
        self._named = []


def _trim_heap() -> None:
    """Give the system what is free of the heap, where the C library can.

    glibc would keep it for the thread that a push comes in, and the next comes in another: an engine of a model of 112
    MiB grew by 650 MiB over 120 pushes.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
