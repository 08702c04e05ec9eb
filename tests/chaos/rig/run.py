"""A whole run under a fault schedule: processes forked, killed and started again as the driver and Ray do it.

The rig is one thread with no sockets of its own, so that it can fork at any time; a process
that dies is noticed by its pipe.
"""

import contextlib
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from learner.run.start import RunStart
from protocol.node.home import Keys
from protocol.settings.run_spec import run_spec
from protocol.settings.settings import Settings
from rollout.neighbours.node import Node
from tests.chaos.rig.part import Part, fork_part
from tests.chaos.rig.processes import Pace, prepare, run_coordinator, run_learner, run_server


@dataclass(frozen=True)
class Parts:
    """What the rig's processes are made of."""

    server: Callable[..., None] = run_server
    learner: Callable[..., None] = run_learner


class Rig:
    """One run. `disturb(rig, now)` is called about every 20 ms and may kill, stop and stall.

    on_death is told who died. failpoint: where processes started from now on die (`protocol.failpoints`).
    route: turns the coordinator's address into the one that its peers are told (a proxy's).
    """

    def __init__(
        self,
        settings: Settings,
        keys: Keys,
        num_servers: int,
        pace: Pace,
        disturb: Callable[["Rig", float], None] = lambda rig, now: None,
        route: Callable[[str], str] = lambda address: address,
        parts: Parts | None = None,
    ) -> None:
        self.settings = settings
        self.keys = keys
        self.counts: Counter[str] = Counter()
        self.step = 0
        self._parts_are = parts or Parts()
        self._pace = pace
        self._disturb = disturb
        self._route = route
        self._node = Node("http://127.0.0.1:1/", None, "unused", keys)
        self._start = RunStart(Path(settings.run.dir) / settings.run.name, None)
        self._where: tuple[str, int] | None = None
        self.preparer: Part | None = None
        self.coordinator: Part | None = None
        self.learner: Part | None = None
        self.servers: dict[str, Part] = {}
        self._attached: set[str] = set()
        self._dead: set[str] = set()
        self._push = RigPush()
        self._ended: str | None = None
        self.may_revive = True
        self.on_death: Callable[[str], None] = lambda name: None
        self.failpoint: str | None = None
        self.status: dict[str, Any] = {}
        self._num_servers = num_servers

    @property
    def folder(self) -> Path:
        return self._start.folder

    def run(self, limit_s: float) -> str:
        """Run to the end; returns how the run ended. Raises: TimeoutError naming where it stands."""
        deadline = time.monotonic() + limit_s
        try:
            for number in range(self._num_servers):
                self._start_server(f"server-{number}")
            self._begin_life()
            while self._ended is None:
                now = time.monotonic()
                if now > deadline:
                    raise TimeoutError(f"step {self.step} after {limit_s:g} s; {dict(self.counts)}")
                self._hear()
                self._disturb(self, now)
            self._close()
            return self._ended
        finally:
            for part in self._parts():
                part.bury()

    def stop(self) -> None:
        """Have the run end after the step under way."""
        if self.coordinator is not None:
            self.coordinator.tell("stop", "the rig has seen enough")

    def ask_status(self) -> None:
        """Have `status` brought up to date soon."""
        if self.coordinator is not None:
            self.coordinator.tell("status")

    def revive(self) -> None:
        """Start the servers that died while `may_revive` was False."""
        for name in list(self._dead):
            self._start_server(name)

    def _parts(self) -> list[Part]:
        servers = [part for name, part in self.servers.items() if name not in self._dead]
        return [part for part in (self.preparer, self.coordinator, self.learner, *servers) if part is not None]

    def _fork(self, name: str, main: Callable[..., None], *arguments: Any) -> Part:
        return fork_part(name, self._parts(), self.failpoint, main, *arguments)

    def _start_server(self, name: str) -> None:
        self.servers[name] = self._fork(name, self._parts_are.server, name, self._node, self._pace)
        self._attached.discard(name)
        self._dead.discard(name)
        if self._where is not None:
            self._attach(name)

    def _attach(self, name: str) -> None:
        assert self._where is not None
        address, incarnation = self._where
        spec = run_spec(self.settings, self._start.run_id, incarnation, self._route(address))
        self.servers[name].tell("attach", spec.model_dump(mode="json"))

    def _begin_life(self) -> None:
        """Put the folder back to the newest checkpoint and start a coordinator; its learner follows."""
        for part in (self.learner, self.coordinator, self.preparer):
            if part is not None:
                part.bury()
        self._where = self.learner = self.coordinator = None
        self._push.forget()
        self._attached.clear()
        self.counts["lives"] += 1
        # In a process of its own, which may die in it as the driver may.
        self.preparer = self._fork("preparer", prepare, self.settings, self._start, self.counts["lives"] > 1)

    def _hear(self) -> None:
        """Take what the processes say; a pipe at its end is a death."""
        by_pipe = {part.pipe: part for part in self._parts()}
        for ready in wait(list(by_pipe), timeout=0.02):
            part = by_pipe[ready]  # type: ignore[index]
            if part not in self._parts():
                continue  # buried by what was heard before it
            try:
                message = part.pipe.recv()
            except (EOFError, ConnectionResetError):
                self._on_death(part)
                continue
            self._on_message(part, *message)

    def _on_death(self, part: Part) -> None:
        self.counts[f"deaths:{part.name.partition('-')[0]}"] += 1
        part.bury()
        if part.process.exitcode != -signal.SIGKILL:
            raise RuntimeError(f"{part.name} ended by itself, with status {part.process.exitcode}")
        self.on_death(part.name)
        if part.name in self.servers:
            self._attached.discard(part.name)
            if self._push.lose(part.name):
                self._let_learner_go_on()
            if self.may_revive:
                self._start_server(part.name)
            else:
                self._dead.add(part.name)
        else:
            self._begin_life()

    def _on_message(self, part: Part, verb: str, *rest: Any) -> None:
        if verb == "prepared":
            self._start = rest[0]
            self.step = self._start.step
            part.bury()
            self.preparer = None
            self.coordinator = self._fork("coordinator", run_coordinator, self.settings, self._start)
        elif verb == "open":
            self._where = (rest[0], rest[1])
            for name in self.servers.keys() - self._dead:
                self._attach(name)
        elif verb == "attach":
            self._attached.add(part.name)
            if self.learner is None and self._where is not None and self._attached == set(self.servers):
                where = (self._route(self._where[0]), self._where[1])
                arguments = (self.settings, self._start, where, self.keys, self._pace)
                self.learner = self._fork("learner", self._parts_are.learner, *arguments)
        elif verb == "push" and part is self.learner:
            for name in self._attached:
                self.servers[name].tell("push", rest[0])
            if self._push.begin(rest[0], self._attached):
                self._let_learner_go_on()
        elif verb == "push":
            if self._push.receive(part.name, rest[0]):
                self._let_learner_go_on()
        elif verb == "status":
            self.status = rest[0]
        elif verb == "step":
            self.step = rest[0]
        elif verb == "ended":
            self._ended = rest[0]

    def _let_learner_go_on(self) -> None:
        """Tell the learner that every server of its push has it, or is gone."""
        if self.learner is not None:
            self.learner.tell("pushed")

    def _close(self) -> None:
        """End as the driver does: servers are detached while the coordinator hears their last word."""
        assert self.coordinator is not None
        servers = [self.servers[name] for name in self.servers.keys() - self._dead]
        for server in servers:
            server.tell("detach")
        deadline = time.monotonic() + 20.0
        for server in servers:
            _hear_last(server, "detach", deadline)
        self.coordinator.tell("close")
        _hear_last(self.coordinator, "closed", deadline)


def _hear_last(part: Part, verb: str, deadline: float) -> None:
    """Wait until a process has said this, or has ended."""
    with contextlib.suppress(EOFError, ConnectionResetError):
        while time.monotonic() < deadline and part.process.is_alive():
            if part.pipe.poll(0.1) and part.pipe.recv()[0] == verb:
                return


class RigPush:
    """The push under way, if there is one.

    Each method returns whether nobody is waited for any more: the learner may go on. It is said once for each push.
    """

    def __init__(self) -> None:
        self._version: int | None = None
        self._awaited: set[str] = set()

    def begin(self, version: int, servers: Iterable[str]) -> bool:
        """Wait for these servers to have this version."""
        self._version, self._awaited = version, set(servers)
        return self._has_ended()

    def receive(self, server: str, version: int) -> bool:
        """Take in that a server has a version; one of an earlier push, of a learner that died, says nothing."""
        return version == self._version and self.lose(server)

    def lose(self, server: str) -> bool:
        """Wait no longer for a server: it has the version, or is gone."""
        self._awaited.discard(server)
        return self._has_ended()

    def forget(self) -> None:
        """Drop the push: its learner is gone."""
        self._version = None

    def _has_ended(self) -> bool:
        if self._version is None or self._awaited:
            return False
        self._version = None
        return True
