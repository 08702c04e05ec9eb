"""What a server passes to its engine's worker processes of a push: vLLM hands it on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo


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
