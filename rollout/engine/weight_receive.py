"""The rollout server's half of the weight push, run inside vLLM's worker processes.

vLLM creates one of these engines per worker and calls it by its weight-transfer protocol: `init_transfer_engine`, then
per push `start_weight_update`, `update_weights` (the buckets), `update_weights` (the digest to expect) and
`finish_weight_update`; `receiving` is asked in between (`core_calls.py`). The learner's half is
`learner/weights/push.py`, the wire is `protocol/weights/wire.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from protocol.weights.group import BroadcastGroup, GlooGroup, nccl_broadcast, reach_store
from protocol.weights.same_machine import SameMachineGroup
from protocol.weights.wire import Bucket, bucket_views, read_update_message
from rollout.engine.known_shapes import KnownShapes
from rollout.engine.merged_parts import lacking_parts
from rollout.engine.own_thread import in_thread
from rollout.engine.received_push import ReceivedPush


@dataclass
class GlooInit(WeightTransferInitInfo):  # type: ignore[misc]
    """Where the learner's store is, and which group of it this server joins."""

    address: str  # host of the learner's store, rank 0's
    port: int  # of that store
    key: str  # names the group inside the store; each new group has its own
    rank_offset: int  # group rank of the first worker; rank 0 is the learner
    world_size: int  # members of the group: the learner and all workers
    deadline_s: float  # longest wait for the peers, to meet and in each broadcast


@dataclass
class SameMachineInit(WeightTransferInitInfo):  # type: ignore[misc]
    """Where the learner waits on this machine."""

    name: str  # of its socket; each attempt to meet has its own
    deadline_s: float  # longest wait for the learner, to meet and in each broadcast


@dataclass
class WeightUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """A push's metadata message, or the digest that its buckets must have had."""

    message: dict[str, Any] = field(default_factory=dict)  # the push's metadata, or empty when only the digest comes
    expected_digest: str | None = None  # that the buckets must have had; None: buckets are to come


class GlooWeightEngine(WeightTransferEngine):  # type: ignore[misc]
    """Receives into a staging copy, in a thread beside generation, and loads it only after its digest was confirmed.

    A push that breaks before the commit therefore leaves the weights in use untouched.
    """

    init_info_cls = GlooInit
    update_info_cls = WeightUpdate

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._group: Future[BroadcastGroup] | None = None
        self._received = ReceivedPush()
        self._staging: Future[list[tuple[Bucket, torch.Tensor]]] | None = None
        self._known = KnownShapes()

    def init_transfer_engine(self, init_info: GlooInit) -> None:
        """Start meeting the learner in a thread: a learner that is gone must not stop this worker's generation."""
        self._group = in_thread("weight-group", partial(_join, init_info, self.parallel_config.rank))

    def parse_update_info(self, update_dict: dict[str, Any]) -> WeightUpdate:
        return _read_update(update_dict)

    def start_weight_update(self) -> None:
        self._received, self._staging = ReceivedPush(), None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class synchronises an accelerator after this, which a CPU does not have.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: WeightUpdate) -> None:
        if update_info.expected_digest is not None:
            self._received.confirm(update_info.expected_digest)
            return
        if self._group is None:
            raise RuntimeError("weight push before this server joined a weight group")
        plan, joined, received = read_update_message(update_info.message), self._group, self._received
        self._known.check(plan)

        def receive() -> list[tuple[Bucket, torch.Tensor]]:
            group = joined.result()
            return list(received.buckets(plan, group.device, group.broadcast))

        self._staging = in_thread("weight-receive", receive)

    def receiving(self) -> Future[list[tuple[Bucket, torch.Tensor]]]:
        """Return what the push under way will have brought, or what ends its receiving."""
        if self._staging is None:
            raise RuntimeError("no push is under way")
        return self._staging

    def finish_weight_update(self) -> None:
        if not self._received.is_confirmed or self._staging is None:
            raise RuntimeError("weight commit before the digest was confirmed")
        staged = self._staging.result()
        named = [pair for bucket, flat in staged for pair in bucket_views(flat, bucket)]
        _let_experts_be_packed(self.model)
        wanted = _begin_reload(self.model)
        try:
            loaded = self.model.load_weights(named)
            lacking = lacking_parts(self.model, [name for name, _ in named])
        finally:
            finalize_layerwise_reload(self.model, self.model_config)
            self._received, self._staging = ReceivedPush(), None
        _complete(self.model, (wanted - loaded) | lacking)
        self._known.keep([bucket for bucket, _ in staged])

    def shutdown(self) -> None:
        self._group = None
        self._received, self._staging = ReceivedPush(), None


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
        self._wanted = _begin_reload(model)

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
        _complete(self._model, (self._wanted - self._loaded) | lacking)
        self._known.keep(self._plan)


class GlooInPlaceEngine(GlooWeightEngine):
    """For servers that have no memory for a second copy of the model."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._load = InPlaceLoad()

    def start_weight_update(self) -> None:
        _let_experts_be_packed(self.model)
        self._load.begin(self.model, self.model_config)

    def receive_weights(self, update_info: WeightUpdate) -> None:
        if self._group is None:
            raise RuntimeError("weight push before this server joined a weight group")
        group = self._group.result()
        self._load.take(update_info, group.device, group.broadcast)

    def finish_weight_update(self) -> None:
        self._load.end()


class SameMachineEngine(GlooInPlaceEngine):
    """For a learner on the same machine, or the same GPU: buckets are copied from where the learner has them."""

    init_info_cls = SameMachineInit

    def init_transfer_engine(self, init_info: SameMachineInit) -> None:
        """Start meeting the learner in a thread."""
        self.shutdown()
        meet = partial(SameMachineGroup.receive, init_info.name, init_info.deadline_s)
        self._group = in_thread("weight-group", meet)

    def shutdown(self) -> None:
        if self._group is not None:
            self._group.add_done_callback(_close)
        super().shutdown()


def _close(met: Future[BroadcastGroup]) -> None:
    if met.exception() is None:
        met.result().close()


class NcclWeightEngine(NCCLWeightTransferEngine):  # type: ignore[misc]
    """vLLM's NCCL engine, with our buckets and digest on its communicator; no second copy of the model on a GPU."""

    update_info_cls = WeightUpdate

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._load = InPlaceLoad()

    def parse_update_info(self, update_dict: dict[str, Any]) -> WeightUpdate:
        return _read_update(update_dict)

    def start_weight_update(self) -> None:
        self._load.begin(self.model, self.model_config)

    def receive_weights(self, update_info: WeightUpdate) -> None:
        self._load.take(update_info, self.device, partial(nccl_broadcast, self.model_update_group))

    def finish_weight_update(self) -> None:
        self._load.end()


def _read_update(update: dict[str, Any]) -> WeightUpdate:
    if set(update) == {"expected_digest"}:
        return WeightUpdate(expected_digest=update["expected_digest"])
    return WeightUpdate(message=update)


def _join(init: GlooInit, worker_rank: int) -> GlooGroup:
    store = reach_store(init.address, init.port, init.deadline_s)
    rank = init.rank_offset + worker_rank
    return GlooGroup(store, init.key, rank, init.world_size, init.address, init.deadline_s)


def _let_experts_be_packed(model: Any) -> None:
    """Have vLLM pack the experts' weights for the CPU when they are loaded next.

    It does so when it makes their kernel, and leaves weights as they come that are loaded under a kernel: after a push
    every logprob of a mixture of experts would be wrong by nats, and no request would fail.
    """
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod):
            method.moe_kernel = None


def _begin_reload(model: Any) -> set[str]:
    """Have vLLM load all weights anew; returns the parameters that must come.

    They are not those that a quantised layer makes of its weights, and tied ones come under their first name alone.
    """
    names = {name for name, _ in model.named_parameters()}
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - names
    initialize_layerwise_reload(model)
    return {name for name, _ in model.named_parameters()} - tied


def _complete(model: Any, missing: Collection[str]) -> None:
    """Bring what vLLM's reload leaves behind up to date.

    Raises: ValueError naming parameters that were missing in the push: they would stay old without anyone noticing.
    """
    for head in model.modules():
        # With tied embeddings the packed copy inside the head is still made of the old embedding: every logprob
        # would be wrong by up to nats, and no request would fail.
        if isinstance(head, ParallelLMHead):
            head.quant_method.process_weights_after_loading(head)
    if missing:
        raise ValueError(f"the push lacks {len(missing)} parameters of the model, first {sorted(missing)[:3]}")
