"""The learner's half of the weight push: every rollout server gets a new policy version, or is named as failed.

One push, in order; each state is a call to every server of a link (`learner.weights.link`), all links at once:

1. gather    the first bucket comes together on rank 0, from all ranks
2. prepare   the metadata message; every server of the link is ready before a byte is sent
3. receive   buckets by broadcast, two in memory at a time; the next is gathered while one is on its way, and who
             hangs is not waited for (`learner.weights.feed`)
4. commit    version and digest. The server pauses after the token under way, compares its digest, loads, takes the
             version and goes on, requests in flight with their cache: one call to its engine's process
5. verify    the learner's and each server's logprobs of a fixed text are compared (`learner.rank.probe`); only a server
             that computes the same begins and ends turns with the version

Over gloo a server generates until 4, beside a second copy of the weights. Without one it stands still from 2 on, and
holds no version until 4. Limits: each state, each bucket and each attempt to join has `weights.deadline_s`; a server
that answers no ping for 8 s is out of reach, whatever state it is in (`learner.weights.presence`).

Who is blamed (protocol/life_of_a_weight_push.md) is pushed to again once it has joined again in the background: no push
waits for a server that failed in an earlier one. Until then it is leased nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Collection, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from learner.weights.buckets import BucketMemory, device_of, pack
from learner.weights.feed import Feed, Feeds
from learner.weights.link import WeightLink
from learner.weights.presence import SILENCE_S
from learner.weights.rendezvous import Rendezvous, rendezvous
from learner.weights.turns import Turn, have_all
from learner.weights.verify import Judge, verify
from protocol.errors import NeighbourError
from protocol.weights.controls import FIRST_TURN, ServerControls
from protocol.weights.digest import WeightDigest
from protocol.weights.group import Store, open_store
from protocol.weights.wire import Bucket, bucket_num_bytes, update_message

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
Faults = dict[str, str]  # server name -> what is wrong with it
_log = logging.getLogger(__name__)
_ABSENT = "the coordinator has no connection to it"
_LATE = "it joined while this push was under way, and takes the next one"


@dataclass(frozen=True)
class PushReport:
    """What one push did."""

    push_s: float  # seconds from the call to the last server's commit or failure
    pause_s: float  # the longest time, in seconds, that a synced server generated nothing
    num_bytes: int  # of all buckets, padding included
    digest: str  # of everything that was sent
    synced: tuple[str, ...]  # names of the servers that hold the version now
    failed: dict[str, str]  # server name -> what it did not do


class WeightPusher:
    """Owns the links to the servers and an event loop in a thread of its own; its methods block their caller.

    address: this machine's; the group's store listens there and nowhere else. backend: "gloo", "nccl" or "ipc".
    deadline_s: longest wait for any one state of a push. silence_s: longest time without an answer to a ping.
    workers_per_server: the servers' tensor-parallel size. shares_group: whether all servers are in one broadcast group,
    without those that failed; as the backend has it, unless told. learner: by `controls.learner_name`.
    """

    def __init__(
        self,
        servers: Sequence[ServerControls],
        address: str,
        backend: str,
        deadline_s: float,
        workers_per_server: int = 1,
        silence_s: float = SILENCE_S,
        shares_group: bool | None = None,
        learner: str = "",
    ) -> None:
        self._address = address
        self._backend = backend
        self._deadline_s = deadline_s
        self._silence_s = silence_s
        self._workers_per_server = workers_per_server
        self._shares_group = backend == "nccl" if shares_group is None else shares_group
        self._attempts = zip(itertools.repeat(learner), itertools.count(1))
        self._turns = zip(itertools.repeat(learner), itertools.count(FIRST_TURN + 1))
        self._links: list[WeightLink] = []
        self._synced: set[str] = set()
        self._absent: frozenset[str] = frozenset()
        self._store: Store
        self._store, self._port = open_store(address, deadline_s) if backend == "gloo" else (None, 0)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="weight-push", daemon=True)
        self._thread.start()
        self.set_servers(servers)

    def set_servers(self, servers: Sequence[ServerControls]) -> None:
        """Push to these from now on. Links to servers that stay are kept; the learner leaves the others' groups."""
        groups = [list(servers)] if self._shares_group else [[server] for server in servers]
        self._run(self._change_links([group for group in groups if group]))

    def leave_out(self, absent: Collection[str]) -> None:
        """Call these servers no more, until this is called without them: who does not answer costs a deadline.

        Those that shared a link with one of them meet anew without it, in the background.
        """
        self._run(self._leave_out(frozenset(absent)))

    def push(
        self, version: int, plan: Sequence[Bucket], gathered: Iterator[Iterable[tuple[str, Tensor]]]
    ) -> PushReport:
        """Give all servers the gathered tensors as policy version `version`.

        plan: the buckets of the wire, by `learner.models.weights.pushed`. gathered: each bucket's tensors by name,
        in the plan's order; they are cast to the plan's dtypes, and taken while the bucket before is on its way.
        Blocks until every server is synced or has failed, at most `deadline_s` for any one state.
        Raises: ValueError when `gathered` is not as planned. A server's failure is in the report, not raised.
        """
        start = time.perf_counter()
        digest = WeightDigest(plan)
        self._run(self._join_new())
        links = [link for link in self._links if link.is_joined]
        memory = BucketMemory(plan, device_of(self._backend))
        packed = pack(plan, gathered, memory)
        flat, before = next(packed, None), None  # gathered before anyone pauses
        pushes = self._run(_start(links, version, plan))
        feeds = Feeds(pushes)
        try:
            while flat is not None:
                if self._run(feeds.put(flat)) and before is not None:
                    memory.give_back(before)
                digest.add(flat)
                flat, before = next(packed, None), flat
            self._run(feeds.put(digest.hexdigest()))
            pauses = self._run(_outcomes(pushes))
        except BaseException:
            self._run(_break_off(pushes))
            raise
        self._synced = {name for link in links if link.is_joined for name in link.names}
        failed = {
            name: link.failure or _LATE for link in self._links for name in link.names if name not in self._synced
        }
        self._loop.call_soon_threadsafe(self._rejoin_failed)
        if failed:
            _log.warning(
                'weight push incomplete  version=%d failed=%r consequence="they are leased nothing"', version, failed
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

    def verify(self, version: int, tokens: Sequence[int] = (), judge: Judge = lambda name, logprobs: None) -> Faults:
        """Have each server that the last push synced serve it, if `judge` finds its logprobs of tokens[1:] right.

        Returns why others do not, by name: they no longer count as synced, and join again in the background.
        """
        asked = [(server, link.attempt) for link in self._links for server in link.servers]
        synced = [(server, attempt) for server, attempt in asked if server.name in self._synced]
        looks = verify(synced, version, list(tokens), judge, self._deadline_s, self._silence_s)
        return self._run(self._part_with(looks))

    def have(self, turn: Turn) -> Faults:
        """Have each server sleep, or wake; those that do not, by name and why, join again in the background."""
        present = [server for link in self._present() for server in link.servers]
        return self._run(self._part_with(have_all(present, next(self._turns), turn, self._deadline_s, self._silence_s)))

    def close(self) -> None:
        """Leave all groups and stop; servers with intact weights go on generating."""
        self._run(_all([link.leave() for link in self._links]))
        self._run(_cancel_the_rest())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _link(self, servers: Sequence[ServerControls], failure: str | None = None) -> WeightLink:
        return WeightLink(servers, self._deadline_s, self._silence_s, self._rendezvous, self._attempts, failure)

    def _rendezvous(self, num_servers: int) -> Rendezvous:
        where = (self._address, self._port)
        return rendezvous(self._backend, where, num_servers, self._workers_per_server, self._deadline_s)

    async def _change_links(self, groups: Sequence[Sequence[ServerControls]]) -> None:
        old = {link.names: link for link in self._links}
        new = [self._link(group) for group in groups]
        self._links = [old.pop(link.names, link) for link in new]
        await _all([link.leave() for link in old.values()])

    async def _join_new(self) -> None:
        while new := [link for link in self._present() if link.is_new]:
            await asyncio.gather(*(link.join() for link in new))
            self._split_failed()

    def _rejoin_failed(self) -> None:
        self._split_failed()
        for link in self._present():
            if not link.is_joined:
                link.rejoin_in_background()

    async def _leave_out(self, absent: frozenset[str]) -> None:
        self._absent = absent
        for link in self._links:
            if gone := absent.intersection(link.names):
                link.lost |= gone
                link.drop(_ABSENT)
        self._rejoin_failed()

    async def _part_with(self, asked: Coroutine[Any, Any, Faults]) -> Faults:
        faults = await asked
        self._synced -= faults.keys()
        for link in self._links:
            if wrong := faults.keys() & set(link.names):
                link.lost |= wrong
                link.drop("; ".join(faults[name] for name in sorted(wrong)))
        self._rejoin_failed()
        for fault in faults.values():
            _log.warning('weight push: %s  consequence="it serves nothing until a good push"', fault)
        return faults

    def _present(self) -> list[WeightLink]:
        return [link for link in self._links if not self._absent.issuperset(link.names)]

    def _split_failed(self) -> None:
        """Replace each link that some of its servers broke: one for the others together, and one for each of these."""
        links = []
        for link in self._links:
            if not link.is_joined and link.is_at_odds:
                link.lost.update(link.names)
            others = [server for server in link.servers if server.name not in link.lost]
            if link.is_joined or len(link.servers) == 1 or not (link.lost and (others or link.is_at_odds)):
                links.append(link)
                continue
            lost = [server for server in link.servers if server.name in link.lost]
            links += [self._link(others)] * bool(others)
            links += [self._link([server], link.failure) for server in lost]
        self._links = links

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


_Push = tuple[asyncio.Task[float], Feed]


async def _start(links: Sequence[WeightLink], version: int, plan: Sequence[Bucket]) -> list[_Push]:
    update = update_message(plan)
    feeds = [Feed() for _ in links]
    return [
        (asyncio.create_task(link.push(version, update, feed)), feed) for link, feed in zip(links, feeds, strict=True)
    ]


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
