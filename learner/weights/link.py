"""One broadcast group of a weight push and the servers in it, with a deadline on every state.

`learner.weights.push` makes one link per server over gloo, so that a server that dies disturbs no other, and one link
for all servers over NCCL, where a single broadcast is what makes many GPUs affordable; either can have either. All
coroutines run on the pusher's event loop; broadcasts block a thread of the link.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from learner.weights.feed import Feed
from learner.weights.presence import SilentServersError, while_present
from learner.weights.rendezvous import Rendezvous
from protocol.errors import NeighbourError
from protocol.failpoints import failpoint
from protocol.one_line import first_line
from protocol.weights.controls import Attempt, ServerControls
from protocol.weights.group import PEER_LOST, BroadcastGroup

BOUNDARY = "weight push"
_LEAVE_S = 5.0
_LAST_WORDS_S = 0.2
_MAX_UNEXPLAINED = 2

T = TypeVar("T")


class WeightLink:
    """Servers that share one broadcast group.

    failure: why they have none now; they must join again then. lost: those of them that it is known to be owed to.
    """

    def __init__(
        self,
        servers: Sequence[ServerControls],
        deadline_s: float,
        silence_s: float,
        meet: Callable[[int], Rendezvous],
        attempts: Iterator[Attempt],
        failure: str | None = None,
    ) -> None:
        """deadline_s: limit of each state. silence_s: limit without an answer to a ping. meet: by number of servers.

        attempts: each newer than all before, of this link and of others.
        """
        self.servers = list(servers)
        self.failure = failure
        self.lost: set[str] = set()
        self._deadline_s = deadline_s
        self._silence_s = silence_s
        self._meet = meet
        self._attempts = attempts
        self.attempt = next(attempts)  # the newest to join or to push
        self._group: BroadcastGroup | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._joining: asyncio.Task[None] | None = None
        self._state = "answer"  # what the servers were last asked to do
        self._num_unexplained = 0  # failures without a success between them that are owed to nobody known

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(server.name for server in self.servers)

    @property
    def is_joined(self) -> bool:
        return self._group is not None

    @property
    def is_at_odds(self) -> bool:
        """True when its servers failed together again and again, and nothing says which of them: the way between two
        of them may be cut.
        """
        return self._num_unexplained >= _MAX_UNEXPLAINED

    @property
    def is_new(self) -> bool:
        """True until a first attempt to join was begun."""
        return self._group is None and self.failure is None and self._joining is None

    async def join(self) -> None:
        """Meet the servers, within the deadline; on failure `failure` says who did not come."""
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weight-link")
        try:
            # Asked first: over NCCL a server that waits for one that is gone generates nothing meanwhile.
            await self._each("answer", lambda server: server.ping(), self._silence_s)
            group = await self._naming_the_silent(self._met(thread))
        except NeighbourError as error:
            thread.shutdown(wait=False, cancel_futures=True)
            self.failure = error.detail
            self._num_unexplained += not self.lost
        else:
            self._group, self._thread, self.failure, self.lost = group, thread, None, set()

    def rejoin_in_background(self) -> None:
        """Start to join again without waiting for it, unless that is under way."""
        if self._joining is None or self._joining.done():
            self._joining = asyncio.get_running_loop().create_task(self.join())

    async def push(self, version: int, update: dict[str, Any], feed: Feed) -> float:
        """Pass the feed's buckets on and commit; returns the longest time that a server generated nothing, in seconds.

        Raises: NeighbourError naming the servers that failed; the link is unjoined then.
        """
        try:
            pause_s = await self._naming_the_silent(self._pass_on(version, update, feed))
        except NeighbourError as error:
            self._num_unexplained += not self.lost
            self.drop(error.detail)
            raise
        except BaseException:
            self.drop("the learner broke the push off")
            raise
        self._num_unexplained = 0
        return pause_s

    async def leave(self) -> None:
        """Tell the servers that the learner goes, and drop the group; a server that does not listen is left alone."""
        if self.is_joined:
            await asyncio.gather(*(_leave(server, self.attempt) for server in self.servers), return_exceptions=True)
        self.drop("the learner left")

    def drop(self, reason: str) -> None:
        """Give the group up; peers that still wait in it see the connection close and fail at once."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
        if self._joining is not None:
            self._joining.cancel()
        if self._group is not None:
            # In a thread of its own: the link's may be stuck in a broadcast, which closing the group ends.
            threading.Thread(target=self._group.close, name="weight-link-close", daemon=True).start()
        self._group, self._thread, self.failure = None, None, reason

    async def _met(self, thread: ThreadPoolExecutor) -> BroadcastGroup:
        meeting = self._meet(len(self.servers))
        inits = {server.name: meeting.init(place) for place, server in enumerate(self.servers)}
        self.attempt = attempt = next(self._attempts)
        limit_s = self._deadline_s
        calls = asyncio.ensure_future(
            self._each("join", lambda server: server.join_weights(attempt, inits[server.name], limit_s), limit_s)
        )
        try:
            met = asyncio.get_running_loop().run_in_executor(thread, meeting.join)
            await self._while_alive(calls, met, "join its group")
            await calls
        finally:
            calls.cancel()
            meeting.close()
        return met.result()

    async def _pass_on(self, version: int, update: dict[str, Any], feed: Feed) -> float:
        pauses_s: list[float] = []
        self.attempt = attempt = next(self._attempts)

        async def commit(server: ServerControls) -> None:
            pauses_s.append(await server.commit(attempt, version, digest))

        receiving: asyncio.Future[None] | None = None
        try:
            # Ended before the first broadcast begins: over NCCL one that waits for a server that is gone never ends.
            await self._each("prepare", lambda server: server.prepare(attempt, update), self._deadline_s)
            failpoint("weight_push.after_prepare")
            # No deadline of its own: it lasts as long as the learner gathers. Each bucket and the end have one.
            receiving = asyncio.ensure_future(self._each("receive", lambda server: server.receive(attempt), None))
            digest = await self._broadcast_all(feed, receiving)
            failpoint("weight_push.after_receive")
            await self._each("commit", commit, self._deadline_s)
            failpoint("weight_push.after_commit")
        finally:
            if receiving is not None:
                receiving.cancel()
        return max(pauses_s)

    async def _naming_the_silent(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await while_present(self.servers, self._silence_s, work)
        except SilentServersError as error:
            self.lost.update(error.names)
            raise NeighbourError(BOUNDARY, f"{error} while it was to {self._state}") from None

    async def _broadcast_all(self, feed: Feed, receiving: asyncio.Future[None]) -> str:
        assert self._group is not None
        loop = asyncio.get_running_loop()
        while True:
            item = await self._while_alive(receiving, asyncio.ensure_future(feed.items.get()), "take buckets", None)
            if isinstance(item, str):
                await self._while_alive(receiving, receiving, "receive the last bucket")
                return item
            sending = loop.run_in_executor(self._thread, self._group.broadcast, item)
            await self._while_alive(receiving, sending, "take a bucket")
            failpoint("weight_push.after_bucket")
            feed.has_sent_one()

    async def _each(
        self, state: str, call: Callable[[ServerControls], Coroutine[Any, Any, None]], limit_s: float | None
    ) -> None:
        """Call all servers at once. Raises: NeighbourError naming everyone who failed or was silent too long."""
        self._state = state

        async def bounded(server: ServerControls) -> None:
            # Called in here: a task that is cancelled before it begins would leave the call's coroutine unawaited.
            async with asyncio.timeout(limit_s):
                await call(server)

        calls = {asyncio.ensure_future(bounded(server)): server.name for server in self.servers}
        try:
            # The first failure ends it: the others may wait in a broadcast for the one that failed, for ever.
            await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
            await asyncio.wait(calls, timeout=_LAST_WORDS_S)
        finally:
            for each in calls:
                each.cancel()
        failed = {name: each.exception() for each, name in calls.items() if each.done() and each.exception()}
        self._blame(failed)
        if failed:
            reasons = [
                f"{name} did not {state} within {limit_s} s"
                if isinstance(error, TimeoutError)
                else f"{name} failed to {state}: {first_line(error)}"
                for name, error in failed.items()
            ]
            raise NeighbourError(BOUNDARY, "; ".join(reasons))

    def _blame(self, failed: Mapping[str, BaseException | None]) -> None:
        """Note to whom a failure is owed: not to who tells of a lost peer, which itself fails when it is asked next."""
        self.lost.update(name for name, error in failed.items() if PEER_LOST not in str(error))

    async def _while_alive(
        self, calls: asyncio.Future[None], awaited: asyncio.Future[T], state: str, limit_s: float | None = 0.0
    ) -> T:
        """Return what `awaited` gives, unless the servers' calls fail first: then nobody is left to wait for.

        limit_s: 0.0 stands for the link's deadline, None for no limit. Raises: NeighbourError.
        """
        limit_s = self._deadline_s if limit_s == 0.0 else limit_s
        waiting: set[asyncio.Future[Any]] = {awaited, calls}
        end = None if limit_s is None else time.monotonic() + limit_s
        while not awaited.done():
            left = None if end is None else end - time.monotonic()
            done, waiting = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if calls in done and calls.exception() is not None:
                awaited.cancel()
                calls.result()
            if not done:
                awaited.cancel()
                raise NeighbourError(BOUNDARY, f"{', '.join(self.names)} did not {state} within {limit_s} s")
        if awaited.exception() is not None:
            # A server that failed by itself also closes its connection; its own words say more than the closing does.
            await asyncio.wait({calls}, timeout=_LAST_WORDS_S)
            if calls.done() and calls.exception() is not None:
                calls.result()
            raise NeighbourError(
                BOUNDARY, f"{', '.join(self.names)} did not {state}: {first_line(awaited.exception())}"
            )
        return awaited.result()


async def _leave(server: ServerControls, attempt: Attempt) -> None:
    async with asyncio.timeout(_LEAVE_S):
        await server.leave(attempt)
