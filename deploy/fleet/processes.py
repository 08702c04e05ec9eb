"""Places of Ray actors, and the standby processes that a run borrows for its learner ranks.

A standby process holds slow imports and none of our code, which may change before its use.
"""

import asyncio
import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from protocol.ray_calls import OUR_ACTOR, own_node_id

_LEARNER_IMPORTS = (
    "torch",
    "torch.distributed",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
)
# A standby process's methods may wait for each other: `train` runs for hours while `progress` is called.
_NUM_CALLS = 4
_BYTES = 1


@dataclass(frozen=True)
class ActorPlace:
    """The node and the resources of one actor."""

    node_id: str | None  # Ray's node ID; None: any node
    num_gpus: float  # GPUs; below 1: a share of one
    resources: Mapping[str, float] = field(default_factory=dict)
    card: str = ""  # GPU of the node that another actor holds, which this one uses too

    def options(self, strategy: str = "DEFAULT") -> dict[str, Any]:
        """Return Ray's options. strategy: for a place without a node.

        The node is soft: Ray waits for room on it, and restarts a server elsewhere when it is gone.
        """
        node = self.node_id and NodeAffinitySchedulingStrategy(self.node_id, soft=True)
        sees = {f"{maker}_VISIBLE_DEVICES": self.card for maker in ("CUDA", "HIP")}
        sees |= {f"RAY_EXPERIMENTAL_NOSET_{name}": "1" for name in sees}  # Ray replaces none of them
        return {
            **({"runtime_env": {"env_vars": sees}} if self.card else {}),
            "num_gpus": self.num_gpus,
            # Ray ignores the node of an actor without resources.
            "memory": _BYTES,
            "resources": dict(self.resources) or None,
            "scheduling_strategy": node or strategy,
        }

    def describe_node(self) -> str:
        """Return " on node IP" by Ray's head; empty without a known node."""
        known = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()} if self.node_id else {}
        return f" on node {known[self.node_id]}" if self.node_id in known else ""

    def matches(self, node_id: str | None, assigned: Mapping[str, float]) -> bool:
        """Return whether an actor on this node with these resources is in such a place."""
        wanted = {name: amount for name, amount in {"GPU": self.num_gpus, **self.resources}.items() if amount}
        return self.node_id in (None, node_id) and dict(assigned) == wanted


def places(
    count: int,
    num_gpus: float,
    nodes: Sequence[str] | None,
    resources: Mapping[str, float] | None,
    cards: Sequence[str] | None = None,
) -> list[ActorPlace]:
    """Return a place for each of `count` actors. nodes: Ray's node IDs, "" for any; cards: one for each; None: any."""
    taken, none = dict(resources or {}), [""] * count
    on = zip(nodes or none, cards or none, strict=True)
    return [ActorPlace(node or None, num_gpus, taken, card) for node, card in on]


def assigned_here() -> dict[str, float]:
    """Return this actor's resources, without CPUs and memory."""
    assigned = ray.get_runtime_context().get_assigned_resources()
    return {name: float(amount) for name, amount in assigned.items() if amount and name not in ("CPU", "memory")}


class StandbyProcess:
    """An actor. Call order: load, then call."""

    def __init__(self, imports: Sequence[str]) -> None:
        # Read by torch at its first allocation. Fresh memory in pages of 2 MiB costs a quarter of the time of 4 KiB.
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
        for name in imports:
            import_module(name)

    def load(self, class_path: str, environment: Mapping[str, str], *arguments: Any) -> None:
        """Make an object of the class `module:Class`. environment: further variables."""
        os.environ.update(environment)
        module, _, name = class_path.partition(":")
        self._object = getattr(import_module(module), name)(*arguments)

    def is_warm(self) -> bool:
        """Return True after the imports."""
        return True

    def call(self, method: str, *arguments: Any) -> Any:
        """Return a method's result."""
        return getattr(self._object, method)(*arguments)


class StandbyPool:
    """The fleet's standby processes. On a cluster with GPUs none is idle: it would hold a GPU."""

    def __init__(self) -> None:
        self._idle: list[Any] = []
        self._borrower: Any = None  # admitted actor, if any
        self._lent: list[Any] = []  # its borrowed processes
        self._watching: asyncio.Task[None] | None = None  # ends with the borrower and its processes

    @property
    def is_lending(self) -> bool:
        """True until an admitted borrower and its processes have ended."""
        return self._watching is not None and not self._watching.done()

    async def admit(self, borrower: Any, timeout_s: float) -> bool:
        """Return whether `borrower`, an actor with `live`, may borrow: one at a time.

        Blocks up to timeout_s while another borrower lives.
        """
        if self._watching is not None and borrower != self._borrower:
            await asyncio.wait([self._watching], timeout=timeout_s)
        if self.is_lending:
            return bool(borrower == self._borrower)
        # No await from the check to here: of two waiting borrowers only one is admitted.
        self._borrower, self._lent = borrower, []
        self._watching = asyncio.create_task(self._end_with(borrower, self._lent))
        return True

    def fill(self, num_processes: int) -> None:
        """Start idle processes up to this number on this node. Returns at once."""
        if num_processes > len(self._idle) and not ray.cluster_resources().get("GPU"):
            here = ActorPlace(own_node_id(), 0)
            self._idle += [_start(here) for _ in range(num_processes - len(self._idle))]

    async def lend(self, places: Sequence[ActorPlace]) -> list[Any]:
        """Return a process for each place, in order, until the borrower ends.

        Idle processes are lent first, for places without resources on this node.
        """
        here, lent_to = own_node_id(), self._lent
        fitting = [number for number, place in enumerate(places) if place in (ActorPlace(here, 0), ActorPlace(None, 0))]
        waiting, self._idle = self._idle[: len(fitting)], self._idle[len(fitting) :]
        answers = await asyncio.gather(*(process.is_warm.remote() for process in waiting), return_exceptions=True)
        warm = [process for process, answer in zip(waiting, answers, strict=True) if answer is True]
        lent_at = dict(zip(fitting, warm, strict=False))
        lent = [lent_at[number] if number in lent_at else _start(place) for number, place in enumerate(places)]
        lent_to += lent
        if lent_to is not self._lent or not self.is_lending:  # the ended borrower's watch misses these
            _end(lent)
        return lent

    def end(self) -> None:
        """End the idle processes."""
        while self._idle:
            ray.kill(self._idle.pop())

    async def _end_with(self, borrower: Any, lent: Sequence[Any]) -> None:
        """End the lent processes when their borrower is gone, and refill the pool."""
        with contextlib.suppress(RayError):  # it crashed or was killed
            await borrower.live.remote()
        _end(lent)
        self.fill(len(lent))


def _end(lent: Sequence[Any]) -> None:
    for process in lent:
        ray.kill(process)


def _start(place: ActorPlace) -> Any:
    options = {**OUR_ACTOR, "max_concurrency": _NUM_CALLS, **place.options()}
    return ray.remote(StandbyProcess).options(**options).remote(_LEARNER_IMPORTS)
