"""Rollout servers, a fleet, a coordinator and a rank 0 for `RunServers`: they answer when the test lets them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from learner.plan.processes import Node, Processes
from learner.run.servers import RunServers
from protocol.errors import NeighbourError, OperatorError
from protocol.node.scale_request import read_reply
from protocol.settings.run_spec import run_spec
from protocol.settings.settings import Settings

NODES = [Node("10.0.0.1", 8, "head", is_head=True), Node("10.0.0.2", 8, "far")]
SPEC = run_spec(Settings(), "my-run", 1, "tcp://127.0.0.1:1")
OURS = {"run_id": "my-run", "incarnation": 1, "ended": None}


class PlayedCalls:
    """`ServerCalls`: what was asked, in order, and the answers to it."""

    def __init__(self, where: dict[str, str]) -> None:
        """where: server -> Ray's name of its node."""
        self.where = where
        self.asked: list[tuple[str, str]] = []  # (server, method)
        self.changes: list[tuple[str, ...]] = []  # calls to the fleet
        self.pushed_to: list[tuple[str, ...]] = []
        self.lost: list[tuple[str, str]] = []
        self.released: list[str] = []
        self.attached: set[str] = set()
        self.silent: set[str] = set()  # servers that do not answer
        self.errors: dict[str, Exception] = {}  # error of each call to this server, or of this method
        self.runs: dict[str, Any] = {}  # run of this server's description, instead of OURS
        self.node_ip = "127.0.0.1"
        self.is_fleet_slow = False
        self.fleet_error: Exception | None = None
        self.drained: frozenset[str] = frozenset()
        self.capacity = 4  # servers that the nodes hold
        self.is_new_silent = False  # True: new servers do not answer

    def ask(self, name: str, method: str, *arguments: Any) -> Any:
        self.asked.append((name, method))
        if method == "attach":
            self.attached.add(name)
        return name, method

    def is_done(self, reference: Any) -> bool:
        name, _ = reference
        return not self.is_fleet_slow if name == "fleet" else name not in self.silent

    def result(self, reference: Any, who: str) -> Any:
        name, answer = reference
        if name == "fleet":
            if self.fleet_error is not None:
                raise self.fleet_error
            return answer
        for key in (name, answer):
            if key in self.errors:
                raise self.errors[key]
        run = self.runs.get(name, OURS if name in self.attached else None)
        return {"run": run, "node_id": self.where.get(name, ""), "node_ip": self.node_ip}

    def add(self, planned: Processes, nodes: Sequence[str]) -> Any:
        self.changes.append(("add", *nodes))
        new = {f"s{len(self.where) + number}": node for number, node in enumerate(nodes)}
        if self.fleet_error is None:
            self.where |= new
        self.silent |= set(new) if self.is_new_silent else set()
        return "fleet", [{"name": name, "node_id": node} for name, node in new.items()]

    def remove(self, name: str) -> Any:
        self.changes.append(("remove", name))
        return "fleet", None

    def plan(self, number: int) -> Processes:
        if number > self.capacity:
            raise OperatorError(f"The nodes hold {self.capacity} servers.")
        places = tuple(([node for node in NODES if node.node_id not in self.drained] * 4)[:number])
        return Processes("servers", number, 1, "spread", 0, "", places=places)

    def push_to(self, names: tuple[str, ...]) -> None:
        self.pushed_to.append(names)

    def lose(self, name: str, reason: str) -> None:
        self.lost.append((name, reason))

    def release(self, name: str, reason: str) -> None:
        self.released.append(name)


class PlayedRun:
    """A run with servers s0, s1, ... on these nodes. late: those whose engines have not started yet."""

    def __init__(
        self,
        folder: Path,
        *nodes: str,
        late: Sequence[str] = (),
        drained: Sequence[str] = (),
        other_index: str = "warn",
    ) -> None:
        self.folder = folder
        self.now = 0.0
        where = {f"s{number}": node for number, node in enumerate(nodes)}
        self.calls = PlayedCalls(where)
        self.calls.silent |= set(late)
        infos = [{"name": name, "node_id": node, "is_started": name not in late} for name, node in where.items()]
        self.servers = RunServers(infos, SPEC, self.calls, folder, other_index, clock=lambda: self.now)
        ready = {name: {"content_hash": ""} for name in where if name not in late}
        self.calls.attached |= set(ready)
        self.servers.note_attached(ready)
        self.drain(*drained)

    def drain(self, *nodes: str) -> None:
        self.servers.drained = self.calls.drained = frozenset(nodes)

    def poll(self, times: int = 12) -> list[str]:
        return [message for _ in range(times) for message in self.servers.poll()]

    @property
    def reply(self) -> tuple[str, bool, bool]:
        """The last reply: text, whether it is the last one, whether the request was refused."""
        reply = read_reply(self.folder)
        assert reply is not None
        return reply.text, reply.is_last, reply.is_refused


def broken(name: str) -> NeighbourError:
    return NeighbourError(name, "did not start: no memory")
