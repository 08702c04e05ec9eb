"""What an operator changes of a run while it goes on: the number of its servers, and nodes that it is to leave."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from learner.cluster import servers
from learner.cluster.drain_marks import DrainMarks
from learner.run.await_plan import plan_as_many, plan_servers
from learner.run.server_count import ServerCount
from protocol.errors import SettingsError
from protocol.node.drained import Leaving
from protocol.ray_calls import own_node_id

if TYPE_CHECKING:
    from collections.abc import Sequence
    from collections.abc import Set as AbstractSet
    from pathlib import Path

    from learner.cluster.processes import Rank
    from learner.plan.processes import Topology
    from learner.run.context import RunContext
    from learner.run.server_watch import ServerWatch
    from protocol.settings.run_spec import EngineRequest

_NOTHING_LEFT = Leaving(text="Nothing of the run's processes is there.", is_over=True)


class Moved(Exception):
    """Learner ranks left a drained node: the run begins again on others, from the checkpoint that they have saved."""


class Changes:
    """Polled while ranks train. `moving`: why the run ends its step and begins again elsewhere; empty: it does not."""

    def __init__(
        self,
        context: RunContext,
        folder: Path,
        topology: Topology,
        names: Sequence[str],
        late: Sequence[str],
        watch: ServerWatch,
        engine: EngineRequest | None,
        rank: Rank,
        coordinator: Any,
    ) -> None:
        """names: of the rollout servers. late: those of them that are still being started. engine: theirs; None:
        the run has none. rank: the first, which pushes.
        """
        self.moving = ""
        self._context = context
        self._coordinator = coordinator
        self._shares_devices = topology.shares_devices
        self._of_ranks = {node.node_id for node in topology.ranks.places}
        self._of_command = own_node_id()
        self._names = list(names)
        self._marks = DrainMarks()
        self._drained: frozenset[str] = frozenset()
        self._words: dict[str, Leaving] = {}  # what servers have to say of each drained node
        self._of_moving: Leaving | None = None  # what ranks have to say of the drained nodes that they are on
        self._count: ServerCount | None = None
        if engine is not None:
            self._count = ServerCount(
                folder,
                names,
                watch,
                servers.AskedFleet(engine),
                plan=lambda number: plan_servers(context, topology, number),
                push_to=lambda names: rank.ask("push_to", names),
                release=lambda name, why: coordinator.release_server.remote(name, why),
                drained=self._left_by_servers,
                say=self._words.__setitem__,
                late=late,
            )

    @property
    def names(self) -> list[str]:
        """The rollout servers of the run as it is now."""
        return self._names if self._count is None else list(self._count.names)

    def poll(self) -> list[str]:
        """Go on with what is under way; returns what the user should be told."""
        self._drained = self._marks.nodes()
        told = [] if self.moving else self._leave_with_ranks(self._drained & self._of_ranks)
        if self._count is not None and not self.moving:
            told += self._count.poll()
        if words := {node: word for node in self._drained if (word := self._word_of(node)) is not None}:
            self._marks.tell(words)
        return told

    def _left_by_servers(self) -> frozenset[str]:
        """Return the drained nodes; a server that takes turns with a rank leaves with that one alone."""
        return self._drained - self._of_ranks if self._shares_devices else self._drained

    def _leave_with_ranks(self, left: AbstractSet[str]) -> list[str]:
        """Have the run end its step where ranks are on drained nodes, and others can hold them."""
        if not left:
            self._of_moving = None
            return []
        was_told = self._of_moving is not None
        try:
            plan_as_many(self._context)
        except SettingsError as error:
            self._of_moving = Leaving(text=f"Learner ranks stay there. {error}", is_stuck=True)
            return [] if was_told else [f"Learner ranks stay on a drained node. {error}"]
        self.moving = "Learner ranks left a node that is drained"
        self._of_moving = Leaving(text="Learner ranks are there: the run ends its step and begins again without them.")
        self._coordinator.stop_after_step.remote("a node is drained")
        return ["Learner ranks are on a node that is drained: after this step the run begins again without it."]

    def _word_of(self, node: str) -> Leaving | None:
        if node in self._of_ranks:
            return self._of_moving
        word = _NOTHING_LEFT if self._count is None else self._words.get(node)
        if word is not None and word.is_over and node == self._of_command:
            return Leaving(text="The run's own command is there, and stays until the run ends.", is_stuck=True)
        return word
