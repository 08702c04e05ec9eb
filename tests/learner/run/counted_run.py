"""A run whose number of servers is changed, with a fleet that answers when the test lets it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from learner.plan.processes import Node, Processes
from learner.run.server_count import ServerCount
from learner.run.server_watch import ServerWatch
from protocol.errors import NeighbourError, OperatorError
from protocol.node.drained import Leaving
from protocol.node.scale_request import read_reply
from protocol.settings.run_spec import run_spec
from protocol.settings.settings import Settings

NODES = [Node("10.0.0.1", 8, "head", is_head=True), Node("10.0.0.2", 8, "far")]


class Fleet:
    """`FleetCalls`: what was asked, and the answers to it, in order."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.where = {"sluice-rollout-0": "head"}  # server -> Ray's name of its node
        self.is_slow = False
        self.failure: Exception | None = None

    def add(self, planned: Processes, nodes: Sequence[str]) -> Any:
        self.asked.append(("add", *nodes))
        new = {f"sluice-rollout-{len(self.where) + number}": node for number, node in enumerate(nodes)}
        self.where |= new
        return [{"name": name} for name in new]

    def remove(self, name: str) -> Any:
        self.asked.append(("remove", name))

    def describe(self) -> Any:
        return [{"name": name, "node_id": node} for name, node in self.where.items()] + [{"name": "silent"}]

    def is_done(self, reference: Any) -> bool:
        return not self.is_slow

    def result(self, reference: Any) -> Any:
        if self.failure is not None:
            raise self.failure
        return reference


class Servers:
    """`ServerCalls` to servers that answer at once, or never."""

    def __init__(self) -> None:
        self.do_answer = False
        self.broken: set[str] = set()  # those that fail whatever they are asked
        self._attached: set[str] = set()

    def ask(self, name: str, method: str, *arguments: Any) -> Any:
        if method == "attach":
            self._attached.add(name)
        return name

    def is_done(self, reference: Any) -> bool:
        return self.do_answer

    def result(self, reference: Any, name: str) -> Any:
        if name in self.broken:
            raise NeighbourError(name, "failed")
        run = {"run_id": "my-run", "incarnation": 1, "ended": None} if name in self._attached else None
        return {"run": run}


class Run:
    """A run of some servers in a folder, and what it was told."""

    def __init__(self, folder: Path, names: Sequence[str] = ("sluice-rollout-0",), late: Sequence[str] = ()) -> None:
        """late: which of the servers are still being started."""
        self.folder = folder
        self.fleet = Fleet()
        self.pushed_to: list[tuple[str, ...]] = []
        self.released: list[str] = []
        spec = run_spec(Settings(), "my-run", 1, "tcp://127.0.0.1:1")
        self.servers = Servers()
        in_time = [name for name in names if name not in late]
        self.watch = ServerWatch(in_time, spec, lambda name, why: None, self.servers)
        self.watch.add(late)
        self.drained: set[str] = set()
        self.words: dict[str, DrainReport] = {}
        self.now = 0.0
        self.capacity = 4  # servers that the nodes which are not drained hold
        self.count = ServerCount(
            folder,
            names,
            self.watch,
            self.fleet,
            plan=self.plan,
            push_to=self.pushed_to.append,
            release=lambda name, why: self.released.append(name),
            drained=lambda: frozenset(self.drained),
            say=self.words.__setitem__,
            clock=lambda: self.now,
            late=late,
        )

    def plan(self, number: int) -> Processes:
        if number > self.capacity:
            raise OperatorError(f"The nodes hold {self.capacity} servers.")
        places = tuple(([node for node in NODES if node.node_id not in self.drained] * 4)[:number])
        return Processes(
            role="servers", count=number, num_gpus=1, where="spread", memory_bytes=0, besides="", places=places
        )

    def polled(self, times: int = 3) -> list[str]:
        return [message for _ in range(times) for message in self.count.poll()]

    @property
    def answer(self) -> tuple[str, bool, bool]:
        answer = read_reply(self.folder)
        assert answer is not None
        return answer.text, answer.is_last, answer.is_refused
