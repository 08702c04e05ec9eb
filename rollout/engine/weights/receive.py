"""The rollout server's half of the weight push, as vLLM's weight-transfer engines.

| engine | transport | where the buckets go |
|---|---|---|
| GlooWeightEngine | gloo broadcast | host memory; loaded after the digest is confirmed |
| GlooInPlaceEngine | gloo broadcast | into the model, bucket by bucket |
| SameMachineEngine | the learner's memory | into the model, bucket by bucket |
| NcclWeightEngine | NCCL broadcast | into the model, bucket by bucket |

vLLM creates one engine per worker and calls it in this order: `init_transfer_engine`, then for each push
`start_weight_update`, `update_weights` (the buckets), `update_weights` (the expected digest), `finish_weight_update`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferInitInfo

from protocol.weights.group import BroadcastGroup, GlooGroup, ReceivedPush, in_thread, nccl_broadcast
from protocol.weights.same_machine import SameMachineGroup, card_address
from protocol.weights.wire import Bucket, PlanReader
from rollout.engine.weights.reload import Reload, drop_expert_kernels

ReceivedBuckets = list[tuple[Bucket, Tensor]]


@dataclass
class GlooInit(WeightTransferInitInfo):  # type: ignore[misc]
    """The address of the learner's store, and this server's place in the broadcast group."""

    address: str  # host of rank 0's store
    port: int
    key: str  # name of the group inside the store; each new group has a new one
    rank_offset: int  # group rank of the first worker; rank 0 is the learner
    world_size: int  # number of members: the learner and all workers
    deadline_s: float  # limit for the rendezvous and for each broadcast


@dataclass
class SameMachineInit(WeightTransferInitInfo):  # type: ignore[misc]
    """The socket at which the learner waits on this machine."""

    name: str  # name of the socket; each rendezvous has a new one
    deadline_s: float  # limit for the rendezvous and for each broadcast
    server: str = ""  # this server's name where a rank waits on each card; then `name` is of all cards
    first_worker: int = 0  # number of this server's first worker among all servers'


@dataclass
class WeightUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """A push's metadata message, or the digest that the learner computed."""

    message: dict[str, Any] = field(default_factory=dict)  # metadata; empty in the message that has the digest
    expected_digest: str | None = None  # learner's digest; None in the message that has the metadata


class GlooWeightEngine(WeightTransferEngine):  # type: ignore[misc]
    """Receives into host memory while vLLM generates, and loads once the digest is confirmed."""

    init_info_cls = GlooInit
    update_info_cls = WeightUpdate

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._group: Future[BroadcastGroup] | None = None
        self._plans = PlanReader()
        self._received = ReceivedPush()
        self._receiving: Future[ReceivedBuckets] | None = None

    def init_transfer_engine(self, init_info: GlooInit) -> None:
        """Start the rendezvous in a thread: a learner that is gone must not block generation in this worker."""
        self._group = in_thread("weight-group", partial(GlooGroup.join, vars(init_info), self.parallel_config.rank))

    def parse_update_info(self, update_dict: dict[str, Any]) -> WeightUpdate:
        return _read_update(update_dict)

    def start_weight_update(self) -> None:
        self._forget()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class then synchronises an accelerator, which a CPU does not have.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: WeightUpdate) -> None:
        if update_info.expected_digest is not None:
            self._received.confirm(update_info.expected_digest)
            return
        if self._group is None:
            raise RuntimeError("weight push before this server joined a weight group")
        plan, joined, received = self._plans.read(update_info.message), self._group, self._received

        def receive() -> ReceivedBuckets:
            group = joined.result()
            return list(received.buckets(plan, group.device, group.broadcast))

        self._receiving = in_thread("weight-receive", receive)

    def receiving(self) -> Future[ReceivedBuckets]:
        """Return the future of the current push's buckets; it fails with the error that stopped the push."""
        if self._receiving is None:
            raise RuntimeError("no push is under way")
        return self._receiving

    def finish_weight_update(self) -> None:
        if not self._received.is_confirmed or self._receiving is None:
            raise RuntimeError("weight commit before the digest was confirmed")
        buckets = self._receiving.result()
        try:
            self.load_received(buckets)
        finally:
            self._forget()
            in_thread("weight-free", buckets.clear)  # freeing a large model takes time that generation needs

    def load_received(self, buckets: ReceivedBuckets) -> None:
        """Make these weights the model's. Raises: ValueError naming missing parameters; vLLM's errors."""
        drop_expert_kernels(self.model)
        reload = Reload(self.model, self.model_config)
        try:
            for bucket, flat in buckets:
                reload.load(bucket, flat)
        except BaseException:
            reload.abort()
            raise
        reload.finish()

    def shutdown(self) -> None:
        self._group = None
        self._forget()

    def _forget(self) -> None:
        self._received, self._receiving = ReceivedPush(), None


class InPlaceLoad:
    """Loads buckets into a paused model as they arrive. A failed push leaves mixed weights, which are not served."""

    def __init__(self) -> None:
        self._plans = PlanReader()
        self._received = ReceivedPush()
        self._reload: Reload | None = None

    def begin(self, model: Any, model_config: Any) -> None:
        self._received, self._reload = ReceivedPush(), Reload(model, model_config)

    def take(self, update: WeightUpdate, device: str | torch.device, broadcast: Callable[[Tensor], None]) -> None:
        """Load a push's buckets, or compare their digest with the expected one."""
        assert self._reload is not None
        try:
            if update.expected_digest is not None:
                self._received.confirm(update.expected_digest)
                return
            plan = self._plans.read(update.message)
            for bucket, flat in self._received.buckets(plan, device, broadcast):
                self._reload.load(bucket, flat)
                del flat
        except BaseException:
            self._reload.abort()
            raise

    def end(self) -> None:
        if not self._received.is_confirmed or self._reload is None:
            raise RuntimeError("weight commit before the digest was confirmed")
        self._received = ReceivedPush()
        self._reload.finish()


class GlooInPlaceEngine(GlooWeightEngine):
    """Loads in place, for servers without memory for a second copy of the model."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._load = InPlaceLoad()

    def start_weight_update(self) -> None:
        drop_expert_kernels(self.model)
        self._load.begin(self.model, self.model_config)

    def receive_weights(self, update_info: WeightUpdate) -> None:
        if self._group is None:
            raise RuntimeError("weight push before this server joined a weight group")
        group = self._group.result()
        self._load.take(update_info, group.device, group.broadcast)

    def finish_weight_update(self) -> None:
        self._load.end()


class SameMachineEngine(GlooInPlaceEngine):
    """Copies the buckets from the memory of a learner on the same machine or GPU, and loads in place."""

    init_info_cls = SameMachineInit

    def init_transfer_engine(self, init_info: SameMachineInit) -> None:
        """Start the rendezvous in a thread. A rank that waits on this worker's card answers at once."""
        self.shutdown()
        name, server = init_info.name, init_info.server
        if server:
            name = card_address(name, init_info.first_worker + self.parallel_config.rank)
        self._group = in_thread("weight-group", partial(SameMachineGroup.receive, name, init_info.deadline_s, server))
        if server:  # rank 0 knows by this call that every worker has joined
            self._group.result()

    def receive_weights(self, update_info: WeightUpdate) -> None:
        try:
            super().receive_weights(update_info)
        except BaseException:
            self.shutdown()  # the rank on this card, which rank 0 cannot tell, stops to wait at once
            raise

    def shutdown(self) -> None:
        if self._group is not None:
            self._group.add_done_callback(_close)
        super().shutdown()


@dataclass(kw_only=True)
class NcclInit(NCCLWeightTransferInitInfo):  # type: ignore[misc]
    """The address of the learner's rendezvous, and this server's place in the group."""

    deadline_s: float  # limit for each broadcast


class NcclWeightEngine(NCCLWeightTransferEngine):  # type: ignore[misc]
    """vLLM's NCCL engine with our buckets and digest. Loads in place: GPUs hold no second copy of the model."""

    init_info_cls = NcclInit
    update_info_cls = WeightUpdate

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._load = InPlaceLoad()
        self._deadline_s = 0.0

    def init_transfer_engine(self, init_info: NcclInit) -> None:
        self._deadline_s = init_info.deadline_s
        super().init_transfer_engine(init_info)

    def parse_update_info(self, update_dict: dict[str, Any]) -> WeightUpdate:
        return _read_update(update_dict)

    def start_weight_update(self) -> None:
        self._load.begin(self.model, self.model_config)

    def receive_weights(self, update_info: WeightUpdate) -> None:
        broadcast = partial(nccl_broadcast, self.model_update_group, deadline_s=self._deadline_s)
        self._load.take(update_info, self.device, broadcast)

    def finish_weight_update(self) -> None:
        self._load.end()


def _close(met: Future[BroadcastGroup]) -> None:
    if met.exception() is None:
        met.result().close()


def _read_update(update: dict[str, Any]) -> WeightUpdate:
    if set(update) == {"expected_digest"}:
        return WeightUpdate(expected_digest=update["expected_digest"])
    return WeightUpdate(message=update)
