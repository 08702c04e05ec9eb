"""The learner's half of the weight push: every rollout server gets a new policy version, or is named as failed.

`learner.rank_push` calls `WeightPusher.push` on rank 0 after each optimizer step. Control goes by `ServerControl` calls,
tensors by broadcast buckets (`learner.weight_link`); the server's half is `rollout/weight_receive.py`. Per server:

    join (once)   pause -> receive ==(buckets)==> commit(version, digest) -> resume

A server that fails in any state is left alone until it has joined again, which happens behind the training: no push
waits for a server that failed in an earlier one.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from learner.weight_link import ServerControl, WeightLink
from protocol.errors import NeighbourError
from protocol.weight_wire import Bucket, TensorMeta, WeightDigest, bucket_num_bytes, bucket_views, plan_buckets

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PushReport:
    """What one push did. pause_s: the longest time that a synced server generated nothing, 0.0 with none synced."""

    push_s: float
    pause_s: float
    num_bytes: int
    digest: str
    synced: tuple[str, ...]
    failed: dict[str, str]


class WeightPusher:
    """Owns the links to the servers and an event loop in a thread of its own; its methods block the caller.

    backend: "gloo" or "nccl". address: this machine's, where the group's store listens and nowhere else.
    deadline_s: longest wait for any one state of a push. workers_per_server: the servers' tensor-parallel size.
    """

    def __init__(
        self,
        servers: Sequence[ServerControl],
        address: str,
        backend: str,
        deadline_s: float,
        bucket_bytes: int,
        workers_per_server: int = 1,
    ) -> None:
        self._address = address
        self._backend = backend
        self._deadline_s = deadline_s
        self._bucket_bytes = bucket_bytes
        self._workers_per_server = workers_per_server
        self._links: list[WeightLink] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="weight-push", daemon=True)
        self._thread.start()
        self.set_servers(servers)

    def set_servers(self, servers: Sequence[ServerControl]) -> None:
        """Push to these from now on. Links to servers that stay are kept, the others' are dropped without a word."""
        groups = [[server] for server in servers] if self._backend == "gloo" else [list(servers)]
        kept = {tuple(server.name for server in link.servers): link for link in self._links}
        links = []
        for group in filter(None, groups):
            link = kept.pop(tuple(server.name for server in group), None)
            links.append(link or self._new_link(group))
        for link in kept.values():
            self._run(link.drop("is no longer a rollout server of this run"))
        self._links = links

    def push(
        self, version: int, buckets: Iterator[Sequence[tuple[str, Tensor]]], meta: Sequence[TensorMeta]
    ) -> PushReport:
        """Give all servers the tensors of `buckets` as policy version `version`.

        meta: all tensors, in the order in which `buckets` yields them; a tensor is cast to its meta's dtype. How
        `buckets` groups them does not matter: they are packed again into buckets of the wire.
        Blocks for the transfer, at most `deadline_s` for any one state of it.
        Raises: ValueError when `buckets` and `meta` differ. A server's failure is in the report, not raised.
        """
        start = time.perf_counter()
        plan = plan_buckets(meta, self._bucket_bytes)
        ready = self._run(self._ready_links())
        digest = WeightDigest(plan)
        packed = _pack(buckets, plan)
        first = next(packed, None)  # gathered before anyone pauses
        sending = [link.start_push(version, plan) for link in ready] if first is None else []
        try:
            flat = first
            if flat is not None:
                sending = self._start(ready, version, plan)
            while flat is not None:
                self._run(_to_each(ready, flat))
                digest.add(flat)
                flat = next(packed, None)
            self._run(_to_each(ready, digest.hexdigest()))
        except BaseException:
            self._run(_abandon(ready, sending))
            raise
        pauses = dict(zip((link.name for link in ready), self._run(_all(sending)), strict=True))
        return self._report(version, start, plan, digest.hexdigest(), pauses)
