"""A learner's pusher, rollout servers in processes of their own, and faults that strike one of them in a push."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from learner.weights.push import PushReport, WeightPusher
from tests.chaos.rig.control_line import ControlLine
from tests.chaos.rig.memory_engine import weights_of
from tests.chaos.rig.server_nursery import Fault, Nursery, Place
from tests.chaos.rig.two_hosts import TwoHosts
from tests.fakes.planned_weights import planned
from tests.fakes.ports import free_port

DEADLINE_S = 12.0
NUM_TENSORS, NUM_FLOATS = 8, 1 << 13  # eight buckets of 32 KiB
FAR = "server-3"
NAMES = ("server-0", "server-1", "server-2", FAR)
_PUSH_EVERY_S = 0.1
_NUM_TOKENS = 10
_ANSWER_LIMIT_S = 3.0
_AGAIN_S = 0.05
_BACK_LIMIT_S = 60.0
_STRIKE_LIMIT_S = 60.0
_UP_LIMIT_S = 60.0


@dataclass
class Seen:
    """What pushes came to. Times are seconds."""

    pushes: int = 0  # whose report was looked at
    faults: int = 0  # that struck
    unexpected: list[str] = field(default_factory=list)  # failures of servers that no fault had struck
    longest_push_s: float = 0.0
    others_s: list[float] = field(default_factory=list)  # from a struck push's end to tokens of its version, of others
    back_s: list[float] = field(default_factory=list)  # from the end of a fault to the victim's weights


class TokenWatch:
    """Reads servers' tokens in a thread of its own, from now until `close`.

    num_wrong: tokens whose weights are not of the version on them. newest: each server's newest version on a token.
    """

    def __init__(self, where: Mapping[str, tuple[str, int]]) -> None:
        self.num_tokens = self.num_wrong = 0
        self.newest: dict[str, int] = dict.fromkeys(where, -1)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="token-watch", daemon=True)
        self._thread.start()
        self._tasks = [
            asyncio.run_coroutine_threadsafe(self._ask_for_ever(name, *address), self._loop)
            for name, address in where.items()
        ]

    def seconds_until(self, version: int, names: set[str], limit_s: float) -> float:
        """Return after how many seconds each of these servers has written a token of this version; inf: too late."""
        begun = time.monotonic()
        while any(self.newest[name] < version for name in names):
            if time.monotonic() - begun > limit_s:
                return float("inf")
            time.sleep(0.01)
        return time.monotonic() - begun

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _take(self, name: str, tokens: list[Any]) -> None:
        self.num_tokens += len(tokens)
        self.num_wrong += sum(value != version for version, value in tokens)
        self.newest[name] = tokens[-1][0]

    async def _ask_for_ever(self, name: str, host: str, port: int) -> None:
        line = ControlLine(name, host, port)
        while True:
            try:
                async with asyncio.timeout(_ANSWER_LIMIT_S):
                    tokens = await line.call("answer", _NUM_TOKENS)
            except (OSError, RuntimeError):  # it is gone, out of reach, or serves nothing
                await asyncio.sleep(_AGAIN_S)
                continue
            self._take(name, tokens)


class PushedFleet:
    """Four servers that are pushed one version after another; one of them lives on the far host, where there is one.

    shares_group: whether all are in one broadcast group, as over NCCL.
    """

    def __init__(self, shares_group: bool, folder: Path, seed: int, hosts: TwoHosts | None) -> None:
        """This process must have one thread: the servers' processes are forked from a fork of it."""
        self.seen = Seen()
        self.version = 0
        self._folder = folder
        self._hosts = hosts
        address = hosts.near_address if hosts is not None else "127.0.0.1"
        places = {name: Place(address, free_port()) for name in NAMES}
        if hosts is not None:
            hosts.enter(hosts.near)
            places[FAR] = Place(hosts.far_address, free_port(), lambda: hosts.enter(hosts.far))
        where = {name: (place.host, place.port) for name, place in places.items()}
        self._nursery = Nursery(places, seed)
        for name in NAMES:
            self._nursery.start(name)
        self._lines = {name: ControlLine(name, *where[name]) for name in NAMES}
        for name in NAMES:
            self._await(name)
        self._pusher = WeightPusher(list(self._lines.values()), address, "gloo", DEADLINE_S, shares_group=shares_group)
        self.watch = TokenWatch(where)

    def push_well(self) -> None:
        """Push the next version, which every server must take."""
        self.version += 1
        report = self._push()
        self.seen.unexpected += [f"version {self.version}: {why}" for why in report.failed.values()]
        time.sleep(_PUSH_EVERY_S)

    def push_badly(self, victim: str, fault: Fault) -> None:
        """Push the next version while a fault strikes the victim; then see to the others, end the fault, await it."""
        fault = replace(fault, struck=str(self._folder / f"struck-{fault.number}"))
        self._arm(victim, fault)
        self.version += 1
        report = self._push()
        others = set(NAMES) - {victim}
        self._note_others(report, others)
        begun = time.monotonic()
        while not Path(fault.struck).exists() and time.monotonic() - begun < _STRIKE_LIMIT_S:
            self.version += 1  # a join is tried in the background of pushes
            self._note_others(self._push(), others)
            time.sleep(_PUSH_EVERY_S)
        self.seen.faults += Path(fault.struck).exists()
        self._revive(victim, fault)
        self._await_victim(victim)

    def close(self) -> None:
        self.watch.close()
        self._pusher.close()
        self._nursery.close()

    def _push(self) -> PushReport:
        weights = weights_of(self.version, NUM_TENSORS, NUM_FLOATS)
        report = self._pusher.push(self.version, *planned(weights, 4 * NUM_FLOATS))
        begun = time.monotonic()
        faults = self._pusher.verify(self.version)
        self.seen.pushes += 1
        self.seen.longest_push_s = max(self.seen.longest_push_s, report.push_s + time.monotonic() - begun)
        served = tuple(name for name in report.synced if name not in faults)
        return replace(report, synced=served, failed=report.failed | faults)

    def _note_others(self, report: PushReport, others: set[str]) -> None:
        """Have the others take the version, as the coordinator has it pushed again when nobody holds it, and write."""
        ended = time.monotonic()
        while not others.issubset(report.synced) and time.monotonic() - ended < _BACK_LIMIT_S:
            time.sleep(_PUSH_EVERY_S)
            report = self._push()
        self.watch.seconds_until(self.version, others, _BACK_LIMIT_S)
        self.seen.others_s.append(time.monotonic() - ended)
        # Who shared the victim's group meets anew without it, in the background.
        while not self._have_joined(others) and time.monotonic() - ended < _BACK_LIMIT_S:
            time.sleep(0.02)

    def _have_joined(self, names: set[str]) -> bool:
        return all(link.is_joined for link in self._pusher._links if names.intersection(link.names))

    def _arm(self, victim: str, fault: Fault) -> None:
        if fault.state == "join":  # who is to join must be new
            self._nursery.start(victim, fault)
            self._await(victim)
        else:
            asyncio.run(ControlLine(victim, *self._lines[victim].where).call("arm", asdict(fault)))

    def _revive(self, victim: str, fault: Fault) -> None:
        if fault.kind == "killed":
            self._nursery.start(victim)
            self._await(victim)
        elif fault.kind == "stopped":
            self._nursery.go_on(victim)
        elif fault.kind == "cut" and self._hosts is not None:
            self._hosts.join()

    def _await_victim(self, victim: str) -> None:
        begun = time.monotonic()
        while time.monotonic() - begun < _BACK_LIMIT_S:
            self.version += 1
            report = self._push()
            self.seen.unexpected += [why for name, why in report.failed.items() if name != victim]
            if victim in report.synced:
                break
            time.sleep(_PUSH_EVERY_S)
        self.watch.seconds_until(self.version, {victim}, _BACK_LIMIT_S)
        self.seen.back_s.append(time.monotonic() - begun)

    def _await(self, name: str) -> None:
        """Return when a server that was started answers."""
        limit = time.monotonic() + _UP_LIMIT_S
        while True:
            try:
                return asyncio.run(ControlLine(name, *self._lines[name].where).ping())
            except OSError:
                if time.monotonic() > limit:
                    raise
                time.sleep(0.02)


@contextlib.contextmanager
def pushed_fleet(shares_group: bool, folder: Path, seed: int, hosts: TwoHosts | None) -> Iterator[PushedFleet]:
    """Yield a fleet, gone afterwards."""
    fleet = PushedFleet(shares_group, folder, seed, hosts)
    try:
        yield fleet
    finally:
        fleet.close()


def link_cut(hosts: TwoHosts) -> tuple[str, ...]:
    """Return the command by which a process on the far host cuts its link."""
    return ("ip", "link", "set", hosts.far_end, "down")
