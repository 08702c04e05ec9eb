"""How a run leaves drained nodes: its servers move while it trains, its ranks by a restart of the run elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from learner.cluster.drain_marks import DrainMarks
from learner.run.await_plan import plan_run
from protocol.errors import SettingsError
from protocol.node.ray_nodes import DrainReport
from protocol.ray_calls import own_node_id

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from learner.plan.processes import Topology
    from learner.run.context import RunContext
    from learner.run.servers import RunServers


class RanksMustMove(Exception):
    """Learner ranks left a drained node: the run restarts on other nodes, from the checkpoint that they saved."""


class NodeDrain:
    """Call `poll` every few seconds; it blocks for 0.2 s at most while Ray's head does not answer."""

    def __init__(self, context: RunContext, topology: Topology, servers: RunServers, coordinator: Any) -> None:
        self.must_move = ""  # why the ranks end their step and restart elsewhere; empty: they stay
        self._context = context
        self._servers = servers
        self._coordinator = coordinator
        self._shares_devices = topology.shares_devices
        self._rank_nodes = {node.node_id for node in topology.ranks.places}
        self._own_node = own_node_id()
        self._marks = DrainMarks()
        self._reports: dict[str, DrainReport] = {}  # newest reports, by node
        self._ranks_report: DrainReport | None = None  # report for drained nodes with ranks

    def poll(self) -> list[str]:
        """Set the nodes that servers leave and restart ranks elsewhere if needed; returns messages for the user."""
        drained = self._marks.exchange(self._reports)
        messages = [] if self.must_move else self._move_ranks(drained & self._rank_nodes)
        # A server that takes turns with a rank moves with it.
        self._servers.drained = drained - self._rank_nodes if self._shares_devices else drained
        self._reports = {node: report for node in drained if (report := self._report(node)) is not None}
        return messages

    def _move_ranks(self, leaving: AbstractSet[str]) -> list[str]:
        """Have the run end its step when ranks are on drained nodes and other nodes can hold them."""
        if not leaving:
            self._ranks_report = None
            return []
        was_reported = self._ranks_report is not None
        try:
            plan_run(self._context)
        except SettingsError as error:
            self._ranks_report = DrainReport(text=f"Learner ranks stay there. {error}", is_stuck=True)
            return [] if was_reported else [f"Learner ranks stay on a drained node. {error}"]
        self.must_move = "Learner ranks left a drained node"
        self._ranks_report = DrainReport(text="Learner ranks are there: the run ends its step and restarts elsewhere.")
        self._coordinator.stop_after_step.remote("a node is drained")
        return ["Learner ranks are on a drained node: after this step the run restarts without it."]

    def _report(self, node: str) -> DrainReport | None:
        if node in self._rank_nodes:
            return self._ranks_report
        report = self._servers.drain_report(node)
        if report.is_over and node == self._own_node:
            return DrainReport(text="The run's own command is there, and stays until the run ends.", is_stuck=True)
        return report
