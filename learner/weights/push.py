"""The learner's half of the weight push: every rollout server gets a new policy version, or has a fault.

Example:
    pusher = WeightPusher(servers, address, "gloo", deadline_s=60.0)
    while training:
        report = pusher.push(version, plan, gathered_buckets)       # states 1 to 4
        pusher.verify(version, probe_tokens, judge)                 # state 5
        # pusher.faults: {server name: Fault} of all servers that do not serve `version`
    pusher.close()

Each state is a call to every server of a link (`learner.weights.link`), all links at once:

1. gather    rank 0 has the first bucket, from all ranks
2. prepare   the servers get the metadata message and are ready for the first byte
3. receive   buckets by broadcast, two in memory at a time; the next one is gathered during a broadcast
4. commit    version and digest. The server pauses, compares its digest, loads the weights and resumes
5. verify    the logprobs of a fixed text are compared with the learner's (`learner.rank.push`); only then does a
             server begin and end turns with the version

Over gloo a server generates until state 4. Without a second copy of the weights it pauses from state 2 on.

A server with a fault gets no leases. It joins again in the background, and no push waits for that.
"""

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar

from torch import Tensor

from learner.weights.card import CardRendezvous, OwnCard
from learner.weights.feed import BucketMemory, Feed, Feeds, device_of, pack
from learner.weights.link import SILENCE_S, Fault, Faults, Limits, LinkFailedError, WeightLink, ask, ask_all
from learner.weights.rendezvous import Rendezvous, rendezvous
from protocol.weights.controls import FIRST_TURN, Attempt, ServerControls
from protocol.weights.digest import WeightDigest
from protocol.weights.group import Store, open_store
from protocol.weights.wire import Bucket, bucket_num_bytes, update_message

Judge = Callable[[str, list[float]], str | None]
"""(server name, its logprobs of the probe) -> the reason to reject them; None: accepted."""
DeviceTurn = Literal["sleep", "wake"]

T = TypeVar("T")
_Push = tuple[asyncio.Task[float | None], Feed]
_log = logging.getLogger(__name__)
_NOT_JOINED = Fault("it has not joined the weight group", is_own=False)
_LATE = Fault("it joined while this push was under way, and receives the next one", is_own=False)
_ABSENT = Fault("the coordinator has no connection to it")
_ABORTED = Fault("the learner aborted the push", is_own=False)


@dataclass(frozen=True)
class PushReport:
    """The result of one push."""

    push_s: float  # seconds from the call to the last server's commit or failure
    wait_s: float  # seconds from the call until the last server was ready for the first bucket
    transfer_s: float  # seconds from then until the last bucket was sent
    pause_s: float  # longest time in seconds that a synced server generated nothing
    num_bytes: int  # bytes of all buckets, padding included
    digest: str  # digest of everything that was sent
    synced: tuple[str, ...]  # names of the servers that have the version
    failed: dict[str, str]  # server name -> reason of its failure

    def times(self) -> dict[str, float]:
        return {
            "time/push_s": self.push_s,
            "time/push_wait_s": self.wait_s,
            "time/push_transfer_s": self.transfer_s,
            "time/push_pause_s": self.pause_s,
        }


class WeightPusher:
    """Owns the links to the servers and an event loop in a thread.

    faults: the reason of every server that does not serve the current version, by name.
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
        card: OwnCard | None = None,
    ) -> None:
        """address: this machine's; the store listens only there. backend: "gloo", "nccl" or "ipc".

        workers_per_server: the servers' tensor-parallel size. shares_group: whether all servers share one link; None:
        as the backend prefers. learner: by `controls.learner_name`. card: rank 0's where every rank sends, over ipc.
        """
        self.faults: Faults = {}
        self._address = address
        self._backend = backend
        self._limits = Limits(deadline_s, silence_s)
        self._workers_per_server = workers_per_server
        self._card = card
        self._numbers: dict[str, int] = {}  # of each server, in the order of their first mention
        self._shares_group = backend == "nccl" if shares_group is None else shares_group
        self._attempts = zip(itertools.repeat(learner), itertools.count(1))
        self._turns = zip(itertools.repeat(learner), itertools.count(FIRST_TURN + 1))
        self._links: list[WeightLink] = []
        self._joining: dict[WeightLink, asyncio.Task[None]] = {}
        self._absent: frozenset[str] = frozenset()
        self._store: Store
        self._store, self._port = open_store(address, deadline_s) if backend == "gloo" else (None, 0)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="weight-push", daemon=True)
        self._thread.start()
        self.set_servers(servers)

    def set_servers(self, servers: Sequence[ServerControls]) -> None:
        """Push to these servers from now on. Links to kept servers stay."""
        groups = [list(servers)] if self._shares_group else [[server] for server in servers]
        self._run(self._change_links([group for group in groups if group]))

    def set_absent(self, absent: Collection[str]) -> None:
        """Skip exactly these servers from now on: a call to an unreachable server would wait for its deadline."""
        self._run(self._set_absent(frozenset(absent)))

    def push(
        self, version: int, plan: Sequence[Bucket], gathered: Iterator[Iterable[tuple[str, Tensor]]]
    ) -> PushReport:
        """Send the gathered tensors to all servers as policy version `version`.

        gathered: each bucket's tensors by name, in the plan's order; they are cast to the plan's dtypes.
        Blocks until every server is synced or has a fault, at most `deadline_s` for each state.
        Raises: ValueError when `gathered` differs from the plan.
        """
        start = time.perf_counter()
        digest = WeightDigest(plan)
        self._run(self._join_new())
        links = [link for link in self._links if link.is_joined]
        memory = BucketMemory(plan, device_of(self._backend))
        packed = pack(plan, gathered, memory)
        flat, before = next(packed, None), None  # gathered before any server pauses
        pushes = self._run(self._start(links, version, plan))
        feeds = Feeds(pushes)
        try:
            if self._card is not None and flat is not None:
                self._card.share(self._run(_ready_names(links, pushes)))
            while flat is not None:
                if self._run(feeds.put(flat)) and before is not None:
                    memory.give_back(before)
                digest.add(flat)
                flat, before = next(packed, None), flat
            digest_sent = digest.hexdigest()
            self._run(feeds.put(digest_sent))
            sent, ready = time.perf_counter(), max((link.ready_at for link in links), default=start)
            pauses = self._run(_pauses(pushes))
        except BaseException:
            self._run(self._abort(links, pushes))
            raise
        failed = {name: fault.reason for name, fault in self.faults.items()}
        self._run(self._rejoin_failed())
        if failed:
            _log.warning(
                'weight push incomplete  version=%d failed=%r consequence="they get no leases"', version, failed
            )
        return PushReport(
            push_s=time.perf_counter() - start,
            wait_s=max(0.0, ready - start),
            transfer_s=max(0.0, sent - ready),
            pause_s=max(pauses, default=0.0),
            num_bytes=sum(map(bucket_num_bytes, plan)),
            digest=digest_sent,
            synced=tuple(sorted(name for link in links for name in link.names if name not in failed)),
            failed=failed,
        )

    def verify(
        self, version: int, tokens: Sequence[int] = (), judge: Judge = lambda name, logprobs: None
    ) -> dict[str, str]:
        """Let each synced server serve the version if `judge` accepts its logprobs of tokens[1:].

        Returns the reasons of the rejected servers by name.
        """
        targets = [(server, link.attempt) for link in self._links for server in link.servers]
        synced = [(server, attempt) for server, attempt in targets if server.name not in self.faults]
        return self._run(self._verify_all(synced, version, list(tokens), judge))

    def switch(self, turn: DeviceTurn) -> dict[str, str]:
        """Make all servers sleep or wake; returns the reasons of failed servers by name."""
        present = [server for link in self._present() for server in link.servers]
        return self._run(self._switch_all(present, turn, next(self._turns)))

    def close(self) -> None:
        """Leave all weight groups and stop. Servers with intact weights continue to generate."""
        self._run(_all([link.leave() for link in self._links]))
        self._run(_cancel_other_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # -- inside the event loop ----------------------------------------------------------------------------------------

    def _link(self, servers: Sequence[ServerControls], *, is_new: bool = True) -> WeightLink:
        for server in servers:
            self._numbers.setdefault(server.name, len(self._numbers))
        meet = partial(self._rendezvous, servers)
        return WeightLink(servers, self._limits, meet, self._attempts, is_new=is_new)

    def _rendezvous(self, servers: Sequence[ServerControls], num_servers: int) -> Rendezvous:
        if self._card is not None:
            (name,) = (server.name for server in servers)
            return CardRendezvous(self._card, name, self._numbers[name] * self._workers_per_server)
        where = (self._address, self._port)
        return rendezvous(self._backend, where, num_servers, self._workers_per_server, self._limits.deadline_s)

    async def _change_links(self, groups: Sequence[Sequence[ServerControls]]) -> None:
        old = {link.names: link for link in self._links}
        new = [self._link(group) for group in groups]
        self._links = [old.pop(link.names, link) for link in new]
        names = {name for link in self._links for name in link.names}
        self.faults = {name: fault for name, fault in self.faults.items() if name in names}
        for link in self._links:
            if link in new:
                self.faults |= dict.fromkeys(link.names, _NOT_JOINED)
        for link in old.values():
            self._stop_joining(link)
        await _all([link.leave() for link in old.values()])

    async def _join_new(self) -> None:
        while new := [link for link in self._present() if link.is_new]:
            await asyncio.gather(*map(self._join, new))
            self._split_failed()

    async def _join(self, link: WeightLink) -> None:
        try:
            await link.join()
        except LinkFailedError as error:
            self.faults |= error.faults
        else:  # the earlier reason remains until the next push
            for name in link.names:
                fault = self.faults.get(name, _NOT_JOINED)
                self.faults[name] = _LATE if fault is _NOT_JOINED else replace(fault, is_own=False)

    async def _rejoin_failed(self) -> None:
        """Start to join every link that is not joined, in the background."""
        self._split_failed()
        for link in self._present():
            if not link.is_joined and (link not in self._joining or self._joining[link].done()):
                self._joining[link] = asyncio.create_task(self._join(link))
        self._joining = {link: task for link, task in self._joining.items() if not task.done()}

    async def _set_absent(self, absent: frozenset[str]) -> None:
        self._absent = absent
        await self._add_faults(dict.fromkeys(absent & self._names(), _ABSENT))

    async def _add_faults(self, faults: Faults) -> None:
        """Drop the links of these servers; all their servers join again."""
        for link in self._links:
            if own := {name: fault for name, fault in faults.items() if name in link.names}:
                reason = "; ".join(own[name].reason for name in sorted(own))
                self.faults |= dict.fromkeys(link.names, Fault(reason, is_own=False)) | own
                self._stop_joining(link)
                link.drop()
        await self._rejoin_failed()

    def _stop_joining(self, link: WeightLink) -> None:
        if (joining := self._joining.pop(link, None)) is not None:
            joining.cancel()

    def _split_failed(self) -> None:
        """Give each server that broke a shared link a link of its own; the others share a new one."""
        links = []
        for link in self._links:
            own = {name for name in link.names if link.must_split or self._is_at_fault(name)}
            others = [server for server in link.servers if server.name not in own]
            if link.is_joined or len(link.servers) == 1 or not (own and (others or link.must_split)):
                links.append(link)
                continue
            self._stop_joining(link)
            links += [self._link(others)] * bool(others)
            links += [self._link([server], is_new=False) for server in link.servers if server.name in own]
        self._links = links

    def _is_at_fault(self, name: str) -> bool:
        return name in self.faults and self.faults[name].is_own

    def _names(self) -> set[str]:
        return {name for link in self._links for name in link.names}

    def _present(self) -> list[WeightLink]:
        return [link for link in self._links if not self._absent.issuperset(link.names)]

    async def _start(self, links: Sequence[WeightLink], version: int, plan: Sequence[Bucket]) -> list[_Push]:
        update = update_message(plan)
        feeds = [Feed() for _ in links]
        for name in (name for link in links for name in link.names):
            self.faults.pop(name, None)
        return [
            (asyncio.create_task(self._push_link(link, version, update, feed)), feed)
            for link, feed in zip(links, feeds, strict=True)
        ]

    async def _push_link(self, link: WeightLink, version: int, update: dict[str, Any], feed: Feed) -> float | None:
        """Return the link's pause in seconds, None when it failed."""
        try:
            return await link.push(version, update, feed)
        except LinkFailedError as error:
            self.faults |= error.faults
            return None

    async def _abort(self, links: Sequence[WeightLink], pushes: Sequence[_Push]) -> None:
        for push, _ in pushes:
            push.cancel()
        await asyncio.gather(*(push for push, _ in pushes), return_exceptions=True)
        for link in links:
            if not link.is_joined:
                self.faults |= {name: self.faults.get(name, _ABORTED) for name in link.names}

    async def _verify_all(
        self, synced: Sequence[tuple[ServerControls, Attempt]], version: int, tokens: list[int], judge: Judge
    ) -> dict[str, str]:
        async def verify_one(server: ServerControls, attempt: Attempt) -> Fault | None:
            logprobs: list[float] = []

            async def probe(server: ServerControls) -> None:
                logprobs.extend(await server.probe(attempt, tokens))

            if tokens:
                if (fault := await ask(server, "probe", probe, self._limits)) is not None:
                    return fault
                if (reason := judge(server.name, logprobs)) is not None:
                    return Fault(reason)
            return await ask(server, "serve", lambda server: server.serve(attempt, version), self._limits)

        found = await asyncio.gather(*(verify_one(*each) for each in synced))
        named = zip((server.name for server, _ in synced), found, strict=True)
        return await self._report({name: fault for name, fault in named if fault is not None})

    async def _switch_all(
        self, servers: Sequence[ServerControls], turn: DeviceTurn, attempt: Attempt
    ) -> dict[str, str]:
        def call(server: ServerControls) -> Coroutine[Any, Any, None]:
            return server.sleep(attempt) if turn == "sleep" else server.wake(attempt)

        return await self._report(await ask_all(servers, turn, call, self._limits))

    async def _report(self, faults: Faults) -> dict[str, str]:
        """Record servers that failed on their own; returns their reasons."""
        faults = {name: replace(fault, is_own=True) for name, fault in faults.items()}
        await self._add_faults(faults)
        for fault in faults.values():
            _log.warning('weight push: %s  consequence="it gets no leases until a push succeeds"', fault.reason)
        return {name: fault.reason for name, fault in faults.items()}

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


async def _ready_names(links: Sequence[WeightLink], pushes: Sequence[_Push]) -> list[str]:
    """Return the servers that are ready for the first bucket, once every link is ready or has failed."""
    ready = [asyncio.ensure_future(link.is_ready.wait()) for link in links]
    for wait, (push, _) in zip(ready, pushes, strict=True):
        await asyncio.wait({wait, push}, return_when=asyncio.FIRST_COMPLETED)
        wait.cancel()
    return [name for link in links if link.is_ready.is_set() for name in link.names]


async def _pauses(pushes: Sequence[_Push]) -> list[float]:
    """Return the pauses of the links that succeeded. Raises: an error that is not a server's."""
    outcomes = await asyncio.gather(*(push for push, _ in pushes), return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return [outcome for outcome in outcomes if isinstance(outcome, float)]


async def _all(work: Sequence[Coroutine[Any, Any, T]]) -> list[T | BaseException]:
    return await asyncio.gather(*work, return_exceptions=True)


async def _cancel_other_tasks() -> None:
    """Cancel calls that still wait for hanging servers."""
    remaining = asyncio.all_tasks() - {asyncio.current_task()}
    for task in remaining:
        task.cancel()
    await asyncio.gather(*remaining, return_exceptions=True)
