"""The servers of a weight push: calls to several at once, and the broadcast group that some of them share.

Each call has a deadline and pings, which find a stopped process or a cut link long before the deadline of slow work.
Over gloo each server has its own link, so that a dead server disturbs no other. Over NCCL all servers share one link.
Coroutines run in the pusher's event loop; broadcasts block a thread of the link.

Example: faults = await ask_all(servers, "prepare", lambda server: server.prepare(attempt, update), limits)
         # {"sluice-rollout-1": Fault("sluice-rollout-1 answered no ping for 8 s while it was to prepare")}
"""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from learner.weights.feed import Feed
from learner.weights.rendezvous import Rendezvous
from protocol.failpoints import failpoint
from protocol.one_line import first_line
from protocol.weights.controls import Attempt, ServerControls
from protocol.weights.group import BroadcastGroup, PeerLostError

SILENCE_S = 8.0
ERROR_GRACE_S = 0.2
"""Wait for the other servers' own errors after a first failure."""
_NUM_PARTS = 8  # parts of the silence limit; a ping is sent in each


@dataclass(frozen=True)
class Fault:
    """Why a server does not have the current weights."""

    reason: str  # sentence without a full stop
    is_own: bool = True  # False: another member of its broadcast group failed, or the cause is unknown


Faults = dict[str, Fault]  # by server name


@dataclass(frozen=True)
class Limits:
    """How long a server may take."""

    deadline_s: float  # limit of each call, bucket and rendezvous
    silence_s: float = SILENCE_S  # limit without an answered ping


Call = Callable[[ServerControls], Coroutine[Any, Any, object]]


async def ask_all(
    servers: Sequence[ServerControls], verb: str, call: Call, limits: Limits, *, is_joint: bool = False
) -> Faults:
    """Call all servers at once and return their faults.

    verb: named in the faults. is_joint: the servers share a broadcast, so the first failure ends the other calls,
    without a fault: they could wait for the failed server forever.
    """
    calls = {asyncio.ensure_future(ask(server, verb, call, limits)): server.name for server in servers}
    pending = set(calls)
    try:
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if is_joint and any(task.result() is not None for task in done):
                if pending:
                    await asyncio.wait(pending, timeout=ERROR_GRACE_S)
                break
        return {name: fault for task, name in calls.items() if task.done() and (fault := task.result()) is not None}
    finally:
        await _cancel(*calls)


async def ask(server: ServerControls, verb: str, call: Call, limits: Limits) -> Fault | None:
    work, silence = asyncio.ensure_future(call(server)), asyncio.ensure_future(_silence(server, limits.silence_s))
    timeout_s = None if limits.deadline_s == float("inf") else limits.deadline_s
    try:
        await asyncio.wait({work, silence}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
            return None
        if silence.done():
            return Fault(f"{server.name} answered no ping for {limits.silence_s:g} s while it was to {verb}")
        return Fault(f"{server.name} did not {verb} within {limits.deadline_s} s")
    except Exception as error:  # a server may raise anything
        return Fault(
            f"{server.name} failed to {verb}: {first_line(error)}", is_own=not isinstance(error, PeerLostError)
        )
    finally:
        await _cancel(work, silence)


async def _silence(server: ServerControls, silence_s: float) -> None:
    """Return when no ping was answered for silence_s, at most an eighth later. A failed ping counts as unanswered."""
    await asyncio.sleep(silence_s / _NUM_PARTS)
    num_silent = 1  # consecutive parts; counted rather than timed, so that a pause of this process is one part
    while num_silent < _NUM_PARTS:
        ping = asyncio.ensure_future(server.ping())
        try:
            while not ping.done() and num_silent < _NUM_PARTS:
                await asyncio.wait({ping}, timeout=silence_s / _NUM_PARTS)
                num_silent += not ping.done()
        finally:
            ping.cancel()
        if ping.done():
            is_answered = not ping.cancelled() and ping.exception() is None
            num_silent = 0 if is_answered else num_silent + 1
            await asyncio.sleep(silence_s / _NUM_PARTS)


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


_LEAVE_LIMITS = Limits(5.0)
_MAX_UNEXPLAINED = 2
_OWN_ERROR_S = 2 * ERROR_GRACE_S  # wait for the servers' own errors, which `ask_all` itself collects for half of it

T = TypeVar("T")


class LinkFailedError(Exception):
    """A link failed. faults: one for each of its servers."""

    def __init__(self, faults: Faults) -> None:
        super().__init__("; ".join(fault.reason for fault in faults.values()))
        self.faults = faults


class WeightLink:
    """Servers that share a broadcast group. Call order: join, push any number of times; join again after a drop."""

    def __init__(
        self,
        servers: Sequence[ServerControls],
        limits: Limits,
        meet: Callable[[int], Rendezvous],
        attempts: Iterator[Attempt],
        *,
        is_new: bool = True,
    ) -> None:
        """meet: returns the rendezvous of this many servers. attempts: numbers that grow over all links.

        is_new: False for servers that failed in an earlier link: no push waits for them to join.
        """
        self.servers = list(servers)
        self.is_new = is_new  # True until the first attempt to join
        self._limits = limits
        self._meet = meet
        self._attempts = attempts
        self.attempt = next(attempts)  # latest attempt to join or to push
        self._group: BroadcastGroup | None = None
        self._thread: ThreadPoolExecutor | None = None
        self.is_ready = asyncio.Event()  # set while the servers are ready for the buckets of the latest push
        self.ready_at = 0.0  # time.perf_counter() when the servers were ready for the latest push
        self._num_unexplained = 0  # consecutive failures without a fault of a server's own

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(server.name for server in self.servers)

    @property
    def is_joined(self) -> bool:
        return self._group is not None

    @property
    def must_split(self) -> bool:
        """True after repeated failures that no server caused: the route between two of the servers may be cut."""
        return self._num_unexplained >= _MAX_UNEXPLAINED

    async def join(self) -> None:
        """Meet the servers. Raises: LinkFailedError after at most the deadline."""
        self.is_new = False
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weight-link")
        try:
            # Asked first: over NCCL a server that waits for a dead one generates nothing.
            patience = replace(self._limits, deadline_s=self._limits.silence_s)
            await self._ask("answer", lambda server: server.ping(), patience)
            self._group = await self._met(thread)
        except BaseException:
            thread.shutdown(wait=False, cancel_futures=True)
            raise
        self._thread = thread

    async def push(self, version: int, update: dict[str, Any], feed: Feed) -> float:
        """Broadcast the feed's buckets and commit; returns the longest pause of generation in seconds.

        Raises: LinkFailedError. After any error the servers must join again.
        """
        try:
            pause_s = await self._pass_on(version, update, feed)
        except BaseException:
            self.drop()
            raise
        self._num_unexplained = 0
        return pause_s

    async def leave(self) -> None:
        """Ask the servers to leave the group, and drop it."""
        if self.is_joined:
            await ask_all(self.servers, "leave", lambda server: server.leave(self.attempt), _LEAVE_LIMITS)
        self.drop()

    def drop(self) -> None:
        """Close the group; peers that wait in it fail at once."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
        if self._group is not None:
            # Closed in another thread: the link's may be blocked in a broadcast, which the closing ends.
            threading.Thread(target=self._group.close, name="weight-link-close", daemon=True).start()
        self._group, self._thread = None, None

    async def _met(self, thread: ThreadPoolExecutor) -> BroadcastGroup:
        meeting = self._meet(len(self.servers))
        inits = {server.name: meeting.init(place) for place, server in enumerate(self.servers)}
        self.attempt = attempt = next(self._attempts)
        limit_s = self._limits.deadline_s
        joining = self._begin("join", lambda server: server.join_weights(attempt, inits[server.name], limit_s))
        try:
            met = asyncio.get_running_loop().run_in_executor(thread, meeting.join)
            group = await self._unless_failed(joining, met, "join its group", limit_s)
            self._check(await joining)
        finally:
            joining.cancel()
            meeting.close()
        return group

    async def _pass_on(self, version: int, update: dict[str, Any], feed: Feed) -> float:
        pauses_s: list[float] = []
        self.is_ready.clear()
        self.attempt = attempt = next(self._attempts)

        async def commit(server: ServerControls) -> None:
            pauses_s.append(await server.commit(attempt, version, digest))

        # Over NCCL a broadcast never ends without its peer, so all servers are ready before the first one.
        await self._ask("prepare", lambda server: server.prepare(attempt, update))
        self.ready_at = time.perf_counter()
        self.is_ready.set()
        failpoint("weight_push.after_prepare")
        # Without a deadline: receiving lasts as long as the learner gathers. Each bucket has a deadline.
        endless = replace(self._limits, deadline_s=float("inf"))
        receiving = self._begin("receive", lambda server: server.receive(attempt), endless)
        try:
            digest = await self._broadcast_all(feed, receiving)
        finally:
            receiving.cancel()
        failpoint("weight_push.after_receive")
        await self._ask("commit", commit)
        failpoint("weight_push.after_commit")
        return max(pauses_s)

    async def _broadcast_all(self, feed: Feed, receiving: asyncio.Future[Faults]) -> str:
        """Broadcast until the feed ends; returns the digest, once all servers have the last bucket."""
        assert self._group is not None
        loop, limit_s = asyncio.get_running_loop(), self._limits.deadline_s
        while True:
            item = await self._unless_failed(receiving, asyncio.ensure_future(feed.items.get()), "take buckets", None)
            if isinstance(item, str):
                self._check(await self._unless_failed(receiving, receiving, "receive the last bucket", limit_s))
                return item
            sending = loop.run_in_executor(self._thread, self._group.broadcast, item)
            await self._unless_failed(receiving, sending, "take a bucket", limit_s)
            failpoint("weight_push.after_bucket")
            feed.has_sent_one()

    async def _unless_failed(
        self, asked: asyncio.Future[Faults], work: asyncio.Future[T], state: str, limit_s: float | None
    ) -> T:
        """Return the result of `work`. Raises: LinkFailedError when a server's call fails first, or when it is late."""
        deadline = None if limit_s is None else asyncio.get_running_loop().time() + limit_s
        waiting: set[asyncio.Future[Any]] = {work, asked}
        while not work.done():
            left_s = None if deadline is None else deadline - asyncio.get_running_loop().time()
            done, waiting = await asyncio.wait(waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and (not done or asked.result()):
                work.cancel()
                if not asked.done():  # a server's own deadline ends in the same moment
                    await asyncio.wait({asked}, timeout=_OWN_ERROR_S)
                self._check(asked.result() if asked.done() and not asked.cancelled() else {})
                raise self._failure({}, f"{', '.join(self.names)} did not {state} within {limit_s} s")
        if (error := work.exception()) is None:
            return work.result()
        # A server that failed also closes its connection. Its own error says more than the closing does.
        await asyncio.wait({asked}, timeout=_OWN_ERROR_S)
        if asked.done():
            self._check(asked.result())
        raise self._failure({}, f"{', '.join(self.names)} did not {state}: {first_line(error)}")

    def _begin(self, verb: str, call: Call, limits: Limits | None = None) -> asyncio.Future[Faults]:
        return asyncio.ensure_future(ask_all(self.servers, verb, call, limits or self._limits, is_joint=True))

    async def _ask(self, verb: str, call: Call, limits: Limits | None = None) -> None:
        self._check(await self._begin(verb, call, limits))

    def _check(self, faults: Faults) -> None:
        if faults:
            raise self._failure(faults, "; ".join(fault.reason for fault in faults.values()))

    def _failure(self, faults: Faults, reason: str) -> LinkFailedError:
        """Return the error for a failed link. reason: for its servers without a fault of their own."""
        self._num_unexplained += not any(fault.is_own for fault in faults.values())
        return LinkFailedError({name: faults.get(name, Fault(reason, is_own=False)) for name in self.names})
