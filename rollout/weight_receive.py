"""The rollout server's half of the weight push, run inside vLLM's worker processes.

vLLM creates one of these engines per worker and calls it by its weight-transfer protocol: `init_transfer_engine`,
then per push `start_weight_update`, `update_weights` (the buckets), `update_weights` (the expected digest) and
`finish_weight_update`. The learner's half is `learner/weight_push.py`, the wire is `protocol/weight_wire.py`.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from protocol.weight_group import GlooGroup, reach_store
from protocol.weight_wire import Bucket, WeightDigest, bucket_num_bytes, bucket_views, read_update_message


@dataclass
class GlooInit(WeightTransferInitInfo):
    """Where the learner's store is and which group of it this server joins; sent by the learner."""

    address: str
    port: int
    key: str
    rank_offset: int
    world_size: int
    deadline_s: float


@dataclass
class GlooUpdate(WeightTransferUpdateInfo):
    """Either a push's metadata message, or `expected_digest` alone, which ends it."""

    message: dict[str, Any] = field(default_factory=dict)
    expected_digest: str | None = None


class GlooWeightEngine(WeightTransferEngine[GlooInit, GlooUpdate]):
    """Receives buckets over gloo into a staging copy and loads them only after their digest was confirmed.

    A push that breaks before the commit therefore leaves the weights in use untouched.
    """

    init_info_cls = GlooInit
    update_info_cls = GlooUpdate

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._group: Future[GlooGroup] | None = None
        self._staged: list[tuple[Bucket, torch.Tensor]] = []
        self._digest: str | None = None

    def init_transfer_engine(self, init_info: GlooInit) -> None:
        """Start meeting the learner in a thread: a learner that is gone must not stop this worker's generation."""
        meeting = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weight-group")
        self._group = meeting.submit(_join, init_info, self.parallel_config.rank)
        meeting.shutdown(wait=False)

    def parse_update_info(self, update_dict: dict[str, Any]) -> GlooUpdate:
        if set(update_dict) == {"expected_digest"}:
            return GlooUpdate(expected_digest=update_dict["expected_digest"])
        return GlooUpdate(message=update_dict)

    def start_weight_update(self) -> None:
        self._drop_staged()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class synchronises an accelerator after this, which a CPU does not have.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: GlooUpdate) -> None:
        if update_info.expected_digest is not None:
            if update_info.expected_digest != self._digest:
                received, self._digest = self._digest, None
                self._drop_staged()
                raise ValueError(f"weight digest differs: sent {update_info.expected_digest}, received {received}")
            return
        if self._group is None:
            raise RuntimeError("weight push before this server joined a weight group")
        buckets = read_update_message(update_info.message)
        group = self._group.result()
        digest = WeightDigest(buckets)
        for bucket in buckets:
            flat = torch.empty(bucket_num_bytes(bucket), dtype=torch.uint8)
            group.broadcast(flat)
            digest.add(flat)
            self._staged.append((bucket, flat))
        self._digest = digest.hexdigest()

    def finish_weight_update(self) -> None:
        if self._digest is None:
            raise RuntimeError("weight commit before its digest was confirmed")
        named = [pair for bucket, flat in self._staged for pair in bucket_views(flat, bucket)]
        try:
            _load(self.model, self.model_config, named)
        finally:
            self._drop_staged()

    def shutdown(self) -> None:
        self._group = None
        self._drop_staged()

    def _drop_staged(self) -> None:
        self._staged = []
        self._digest = None


def _join(init: GlooInit, worker_rank: int) -> GlooGroup:
    store = reach_store(init.address, init.port, init.deadline_s)
    rank = init.rank_offset + worker_rank
    return GlooGroup(store, init.key, rank, init.world_size, init.address, init.deadline_s)


def _load(model: torch.nn.Module, model_config: Any, named: list[tuple[str, torch.Tensor]]) -> None:
    """Load checkpoint-named tensors into vLLM's fused and packed layers.

    Raises: ValueError when a parameter of the model was not in the push: it would stay old without anyone noticing.
    """
    expected = {name for name, _ in model.named_parameters()}
    initialize_layerwise_reload(model)
    try:
        loaded = model.load_weights(named)
    finally:
        finalize_layerwise_reload(model, model_config)
    for head in model.modules():
        # With tied embeddings the packed copy inside the head is still made of the old embedding: every logprob
        # would be wrong by up to nats, and no request would fail.
        if isinstance(head, ParallelLMHead):
            head.quant_method.process_weights_after_loading(head)
    missing = expected - set(loaded)
    if missing:
        raise ValueError(f"the push lacks {len(missing)} parameters of the model, first {sorted(missing)[:3]}")
