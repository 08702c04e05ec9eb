"""The learner's half of the weight push: every rollout server gets a new policy version, or is named as failed.

`learner.rank.push` calls `WeightPusher.push` on rank 0 after each optimizer step. Control goes by `ServerControl`
calls, tensors by broadcast (`learner.weights.link`); the server's half is `rollout/engine/weight_receive.py`. For each
server:

    join (once)   pause -> receive ==(buckets)==> commit(version, digest) -> resume

A server that fails in any state is left alone until it has joined again, which happens behind the training: no push
waits for a server that failed in an earlier one.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Collection, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from learner.weights.link import Feed, WeightLink
from learner.weights.meeting import GlooMeeting, Meeting, NcclMeeting
from learner.weights.server_control import ServerControl
from protocol.errors import NeighbourError
from protocol.weights.group import open_store
from protocol.weights.wire import (
    Bucket,
    TensorMeta,
    WeightDigest,
    bucket_num_bytes,
    bucket_views,
    plan_buckets,
    update_message,
)

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
_log = logging.getLogger(__name__)
_ABSENT = "the coordinator has no connection to it"


@dataclass(frozen=True)
class PushReport:
    """What one push did.

    pause_s: the longest time that a synced server generated nothing. failed: server name -> what it did not do.
    """

    push_s: float
    pause_s: float
    num_bytes: int
    digest: str
    synced: tuple[str, ...]
    failed: dict[str, str]


class WeightPusher:
    """Owns the links to the servers and an event loop in a thread of its own; its methods block their caller.

    address: this machine's; the group's store listens there and nowhere else. backend: "gloo" or "nccl".
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
        self._synced: set[str] = set()
        self._absent: frozenset[str] = frozenset()
        if backend == "gloo":
            self._store, self._port = open_store(address, deadline_s)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="weight-push", daemon=True)
        self._thread.start()
        self.set_servers(servers)

    def set_servers(self, servers: Sequence[ServerControl]) -> None:
        """Push to these from now on. Links to servers that stay are kept; the learner leaves the others' groups."""
        groups = [[server] for server in servers] if self._backend == "gloo" else [list(servers)]
        old = {link.names: link for link in self._links}
        new = [WeightLink(group, self._deadline_s, partial(self._meeting, len(group))) for group in groups if group]
        self._links = [old.pop(link.names, link) for link in new]
        self._run(_all([link.leave() for link in old.values()]))

    def leave_out(self, absent: Collection[str]) -> None:
        """Call these servers no more, until this is called without them: who does not answer costs a deadline.

        Servers that share a link are left out together, when all of them are absent.
        """
        self._absent = frozenset(absent)
        self._run(_all([_dropped(link, _ABSENT) for link in self._links if self._absent.issuperset(link.names)]))

    def push(
        self, version: int, buckets: Iterator[Sequence[tuple[str, Tensor]]], meta: Sequence[TensorMeta]
    ) -> PushReport:
        """Give all servers the tensors of `buckets` as policy version `version`.

        meta: all tensors, in the order in which `buckets` yields them; each is cast to its meta's dtype. How `buckets`
        groups them does not matter: they are packed into buckets of the wire, while the ones before are on their way.
        Blocks until every server is synced or has failed, at most `deadline_s` for any one state.
        Raises: ValueError when `buckets` and `meta` differ. A server's failure is in the report, not raised.
        """
        start = time.perf_counter()
        plan = plan_buckets(meta, self._bucket_bytes)
        digest = WeightDigest(plan)
        self._run(self._join_new())
        links = [link for link in self._links if link.is_joined]
        packed = _pack(buckets, plan, _DEVICES[self._backend])
        flat = next(packed, None)  # gathered before anyone pauses
        pushes = self._run(_start(links, version, plan))
        try:
            while flat is not None:
                self._run(_feed(pushes, flat))
                digest.add(flat)
                flat = next(packed, None)
            self._run(_feed(pushes, digest.hexdigest()))
            pauses = self._run(_outcomes(pushes))
        except BaseException:
            self._run(_break_off(pushes))
            raise
        self._synced = {name for link in links if link.is_joined for name in link.names}
        failed = {name: link.failure or "" for link in self._links if not link.is_joined for name in link.names}
        self._loop.call_soon_threadsafe(self._join_failed)
        if failed:
            _log.warning(
                'weight push incomplete  version=%d failed=%r consequence="they serve nothing"', version, failed
            )
        num_bytes = sum(map(bucket_num_bytes, plan))
        return PushReport(
            push_s=time.perf_counter() - start,
            pause_s=max(pauses, default=0.0),
            num_bytes=num_bytes,
            digest=digest.hexdigest(),
            synced=tuple(sorted(self._synced)),
            failed=failed,
        )

    def probe(self, tokens: Sequence[int]) -> dict[str, list[float]]:
        """Return, for each server synced by the last push, its logprobs of tokens[1:].

        A server that does not answer is missing, and no longer counts as synced.
        """
        links = [link for link in self._links if self._synced.issuperset(link.names)]
        answers: dict[str, list[float]] = {}
        for link, answer in zip(links, self._run(_all([link.probe(list(tokens)) for link in links])), strict=True):
            if isinstance(answer, NeighbourError):
                self._synced.difference_update(link.names)
                self._run(_dropped(link, answer.detail))
                _log.warning("weight push: %s", answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                answers |= answer
        return answers

    def close(self) -> None:
        """Leave all groups and stop; servers with intact weights go on generating."""
        self._run(_all([link.leave() for link in self._links]))
        self._run(_cancel_the_rest())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _meeting(self, num_servers: int) -> Meeting:
        world_size = 1 + num_servers * self._workers_per_server
        if self._backend == "gloo":
            return GlooMeeting(self._address, self._port, world_size, self._deadline_s)
        return NcclMeeting(self._address, world_size)

    async def _join_new(self) -> None:
        await asyncio.gather(*(link.join() for link in self._present() if link.is_new))

    def _join_failed(self) -> None:
        for link in self._present():
            if not link.is_joined:
                link.join_behind()

    def _present(self) -> list[WeightLink]:
        return [link for link in self._links if not self._absent.issuperset(link.names)]

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


_DEVICES = {"gloo": "cpu", "nccl": "cuda"}

_Push = tuple[asyncio.Task[float], Feed]


def _pack(buckets: Iterator[Sequence[tuple[str, Tensor]]], plan: Sequence[Bucket], device: str) -> Iterator[Tensor]:
    """Yield the plan's flat buckets, each as soon as the tensors in it were gathered."""
    import torch

    tensors = (pair for bucket in buckets for pair in bucket)
    for bucket in plan:
        flat = torch.zeros(bucket_num_bytes(bucket), dtype=torch.uint8, device=device)
        for expected, view in bucket_views(flat, bucket):
            name, tensor = next(tensors, ("nothing", None))
            if name != expected or tensor is None or tensor.shape != view.shape:
                shape = None if tensor is None else tuple(tensor.shape)
                raise ValueError(
                    f"weight push: meta has {expected} {tuple(view.shape)} where the buckets have {name} {shape}"
                )
            view.copy_(tensor.detach())
        yield flat
    surplus = next(tensors, None)
    if surplus is not None:
        raise ValueError(f"weight push: the buckets have {surplus[0]}, which is not in meta")


async def _start(links: Sequence[WeightLink], version: int, plan: Sequence[Bucket]) -> list[_Push]:
    update = update_message(plan)
    feeds = [Feed() for _ in links]
    return [
        (asyncio.create_task(link.push(version, update, feed)), feed) for link, feed in zip(links, feeds, strict=True)
    ]


async def _feed(pushes: Sequence[_Push], item: Tensor | str) -> None:
    """Give every live link the item, once the quickest wants one.

    So memory is two buckets while servers keep up, and a server that hangs delays nobody: its own buckets wait for it.
    """
    live = [(push, feed) for push, feed in pushes if not push.done()]
    wants = [asyncio.ensure_future(feed.is_wanted.wait()) for _, feed in live]
    if live:
        await asyncio.wait([*wants, *(push for push, _ in live)], return_when=asyncio.FIRST_COMPLETED)
    for want, (_, feed) in zip(wants, live, strict=True):
        want.cancel()
        feed.put(item)


async def _outcomes(pushes: Sequence[_Push]) -> list[float]:
    """Return the pause of each link that succeeded. Raises what was not a server's failure."""
    outcomes = await asyncio.gather(*(push for push, _ in pushes), return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, NeighbourError):
            raise outcome
    return [outcome for outcome in outcomes if isinstance(outcome, float)]


async def _break_off(pushes: Sequence[_Push]) -> None:
    for push, _ in pushes:
        push.cancel()
    await asyncio.gather(*(push for push, _ in pushes), return_exceptions=True)


async def _all(work: Sequence[Coroutine[Any, Any, T]]) -> list[T | BaseException]:
    return await asyncio.gather(*work, return_exceptions=True)


async def _cancel_the_rest() -> None:
    """Cancel what still waits for servers that hang; their answers are of no use any more."""
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)


async def _dropped(link: WeightLink, reason: str) -> None:
    link.drop(reason)
