"""The rollout server's half of the weight push, run inside vLLM's worker processes.

vLLM creates one of these engines per worker and calls it by its weight-transfer protocol: `init_transfer_engine`, then
per push `start_weight_update`, `update_weights` (the buckets), `update_weights` (the digest to expect) and
`finish_weight_update`; `receiving` is asked in between (`core_calls.py`). The learner's half is
`learner/weights/push.py`, the wire is `protocol/weights/wire.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from protocol.weights.group import BroadcastGroup, GlooGroup, nccl_broadcast, reach_store
from protocol.weights.same_machine import SameMachineGroup
from protocol.weights.wire import Bucket, read_update_message
from rollout.engine.own_thread import in_thread
from rollout.engine.weights.in_place import InPlaceLoad
from rollout.engine.weights.known_shapes import KnownShapes
from rollout.engine.weights.messages import GlooInit, SameMachineInit, WeightUpdate
from rollout.engine.weights.received_push import ReceivedPush
from rollout.engine.weights.reload import let_experts_be_packed
from rollout.engine.weights.second_copy import SecondCopy, second_copy


class GlooWeightEngine(WeightTransferEngine):  # type: ignore[misc]
    """Receives into a second copy, in a thread beside generation, and puts it to use once its digest was confirmed.

    A push that breaks before the commit therefore leaves the weights in use untouched.
    """

    init_info_cls = GlooInit
    update_info_cls = WeightUpdate

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._group: Future[BroadcastGroup] | None = None
        self._received = ReceivedPush()
        self._receiving: Future[SecondCopy] | None = None
        self._plan: Sequence[Bucket] = ()
        self._known = KnownShapes()

    def init_transfer_engine(self, init_info: GlooInit) -> None:
        """Start meeting the learner in a thread: a learner that is gone must not stop this worker's generation."""
        self._group = in_thread("weight-group", partial(_join, init_info, self.parallel_config.rank))

    def parse_update_info(self, update_dict: dict[str, Any]) -> WeightUpdate:
        return _read_update(update_dict)

    def start_weight_update(self) -> None:
        self._forget()

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

        def receive() -> SecondCopy:
            group, copy = joined.result(), self.begin_copy(plan)
            try:
                for bucket, flat in received.buckets(plan, group.device, group.broadcast):
                    copy.take(bucket, flat)
                copy.complete()
            except BaseException:
                copy.drop()
                raise
            return copy

        self._plan, self._receiving = plan, in_thread("weight-receive", receive)

    def begin_copy(self, plan: Sequence[Bucket]) -> SecondCopy:
        """Return what a push's buckets go into; called in a thread beside generation."""
        return second_copy(self.model, self.model_config, plan)

    def receiving(self) -> Future[SecondCopy]:
        """Return what the push under way will have brought, or what ends its receiving."""
        if self._receiving is None:
            raise RuntimeError("no push is under way")
        return self._receiving

    def finish_weight_update(self) -> None:
        if not self._received.is_confirmed or self._receiving is None:
            raise RuntimeError("weight commit before the digest was confirmed")
        try:
            self._receiving.result().put_to_use()
        finally:
            self._forget()
        self._known.keep(self._plan)

    def shutdown(self) -> None:
        self._group = None
        self._forget()

    def _forget(self) -> None:
        """Have what a push brought given back, in a thread: generation does not wait for it."""
        if self._receiving is not None:
            self._receiving.add_done_callback(_drop)
        self._received, self._receiving = ReceivedPush(), None


class GlooInPlaceEngine(GlooWeightEngine):
    """For servers that have no memory for a second copy of the model."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._load = InPlaceLoad()

    def start_weight_update(self) -> None:
        let_experts_be_packed(self.model)
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


def _drop(received: Future[SecondCopy]) -> None:
    if received.exception() is None:
        in_thread("weight-drop", received.result().drop)


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
