"""One start of a run: its coordinator and ranks are launched, watched and ended. The rollout servers outlive it."""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from learner.checkpoint.copier import CheckpointCopier
from learner.checkpoint.folder import newer_than, step_of
from learner.cluster import fleet, processes, ray_door, servers
from learner.cluster.cluster_loss import check_cluster
from learner.disk.run_folder import CHECKPOINTS, SEARCH_INDEX, MetricsReader
from learner.live.status import RunStatus, write_status
from learner.live.view import LiveView
from learner.plan.memory import Sizes
from learner.plan.processes import Topology
from learner.plan.topology import plan_topology
from learner.rank.process import WAITING_FOR_BATCH, RunPlace
from learner.run.parts import describe_processes
from learner.run.rank_watch import RankWatch
from learner.run.servers import RunServers
from learner.run.start import RunStart
from protocol.errors import NeighbourError, OperatorError, SettingsError
from protocol.node.home import ClusterState
from protocol.settings.run_spec import TOOL_LIST, EngineRequest, RunSpec, engine_request, run_spec
from protocol.settings.settings import Settings

_POLL_S = 0.5
_CHECK_S = 2.0
# A restarted node is back within minutes.
_NODES_S = 180.0
# The fleet's processes import torch before they are lent.
_IMPORT_S = 180.0


@dataclass(frozen=True)
class RunContext:
    """Everything that all attempts of a run share."""

    settings: Settings  # as given
    model: Path  # local folder of the policy
    sizes: Sizes  # sizes of the run's models, for the plan of each attempt
    services: Mapping[str, str]  # digests of search index and MCP servers' tools, by their names for the user
    cluster: ClusterState  # addresses and files of this node's cluster
    view: LiveView  # panel or log lines that the user sees
    stop: threading.Event  # set by the first Ctrl-C, SIGTERM or SIGHUP
    metrics: MetricsReader  # source of the new lines of metrics.jsonl
    record: Callable[[dict[str, float]], None]  # consumer of each new line of metrics.jsonl
    copies: CheckpointCopier | None  # None: they are not copied


class StoppedAtStart(Exception):
    """Ctrl-C, SIGTERM or SIGHUP came while the run was still starting."""


@dataclass
class RunAttempt:
    """Call order: launch, watch, end; call `end` also after an error."""

    context: RunContext  # shared by all attempts of the run
    start: RunStart
    step: int = 0  # last finished step
    _topology: Topology = field(init=False)  # plan for the cluster's nodes at the launch
    _spec: RunSpec = field(init=False)
    _servers: RunServers = field(init=False)
    _coordinator: Any = None
    _ranks: list[processes.Rank] = field(default_factory=list)
    _num_shown: int = 0  # number of the coordinator's notices that the user has seen

    def launch(self) -> None:
        """Start everything: servers and ranks in parallel, or one after the other where they share devices.

        Raises: the error of the first that fails; StoppedAtStart.
        """
        context, settings, folder = self.context, self.context.settings, self.start.folder.resolve()
        fleet.await_fleet()
        self._topology = plan = await_plan(context)
        begun = (self.start.run_id, self.start.step, context.cluster.node_ip)
        self._coordinator = processes.place_coordinator(settings, folder, *begun, context.model, context.services)
        opening = self._coordinator.open.remote()
        fleet.be_admitted(self._coordinator)
        on = {"on_cpus": not plan.has_gpus, "shares_device": plan.shares_devices and plan.has_gpus}
        engine = engine_request(settings, context.model, plan.backend, **on)
        if plan.shares_devices:
            context.view.show_phase("starting rollout servers")
            ensuring = servers.ensure_servers(engine, plan.servers)
            self._await({opening: "the coordinator", ensuring: "the fleet"})
            self._attach(opening, engine, infos := ray_door.call(ensuring, "the fleet"))
            servers.put_to_sleep(self._servers.names, self._spec)  # ranks load their models on the same devices
            cards = processes.shared_cards(plan.ranks, infos)
            borrowing = processes.borrow_processes(plan.ranks, self._coordinator, cards)
            preparing = self._prepare_ranks(folder, borrowing)
            self._await(preparing)
            self._show_notes(preparing)
            return
        borrowing = processes.borrow_processes(plan.ranks, self._coordinator)
        # A resumed run does not wait for a server that loads its model while others are ready.
        may_be_late = self.start.checkpoint is not None
        ensuring = servers.ensure_servers(engine, plan.servers, may_be_late) if plan.servers.count else None
        context.view.show_phase(f"starting {describe_processes(plan)}")
        waiting = {opening: "the coordinator", **({ensuring: "the fleet"} if ensuring else {})}
        preparing = self._prepare_ranks(folder, borrowing)
        self._await(waiting | preparing)
        self._show_notes(preparing)
        self._attach(opening, engine, ray_door.call(ensuring, "the fleet") if ensuring else [])

    def watch(self) -> str:
        """Show the run until all ranks have returned; returns how it ended.

        Raises: the error of a rank or the coordinator; OperatorError when a rule of the settings ended the run.
        """
        training = {rank.ask("train", self._place()): rank.name for rank in self._ranks}
        first = next(iter(training))
        ranks = RankWatch(self._ranks, ray_door.is_done, ray_door.call)
        checked_at, stopped_at, drain_s = 0.0, 0.0, self.context.settings.run.drain_s
        while training:
            finished = self._finished_ranks(training, ranks)
            training = {reference: name for reference, name in training.items() if name not in finished}
            self._show()
            now = time.monotonic()
            if now - checked_at > _CHECK_S:
                checked_at = now
                check_cluster(self.context.cluster)
                self._check_servers(ranks)
                ranks.poll()
            if stopped_at and now - stopped_at > drain_s:
                return describe_loss(self.start, self.step, drain_s)
            if self.context.stop.is_set() and not stopped_at:
                stopped_at = now
                self._coordinator.stop_after_step.remote("stopped by the user")
                within = f"this step and its checkpoint, within {drain_s:g} s (run.drain_s)"
                self.context.view.message(f"Stopping after {within}; again to stop at once.")
        status = self._show(is_final=True)
        ended = str(ray_door.call(first, self._ranks[0].name))
        if status.give_up_reason is not None:
            raise OperatorError(f"The run ended after step {self.step}. {status.give_up_reason}")
        return ended

    def detach_servers(self) -> None:
        """Detach the rollout servers from the run; they stay warm for the next run."""
        if hasattr(self, "_servers"):
            servers.detach_servers(self._servers.names)

    def end(self) -> None:
        """End coordinator and ranks; afterwards the whole ledger is on disk."""
        try:
            if self._coordinator is not None:
                # The coordinator may have crashed. Everything that it committed is on disk then.
                with contextlib.suppress(NeighbourError, OperatorError):
                    ray_door.call(self._coordinator.close.remote(), "the coordinator")
        finally:
            processes.end(self._coordinator, self._ranks)

    def _prepare_ranks(self, folder: Path, borrowing: Any) -> dict[Any, str]:
        """Make the ranks and have them load their models; returns the calls to await."""
        borrowed = ray_door.call(borrowing, "the fleet", _IMPORT_S)
        self._ranks = processes.make_ranks(borrowed, self._topology, self.context.settings, folder, self.context.model)
        return {rank.ask("prepare", self.start.checkpoint): rank.name for rank in self._ranks}

    def _show_notes(self, prepared: dict[Any, str]) -> None:
        """Show what rank 0 found when it loaded its models."""
        reference, name = next(iter(prepared.items()))
        self._show_messages(ray_door.call(reference, name))

    def _attach(self, opening: Any, engine: EngineRequest, infos: Any) -> None:
        """Attach the servers to the run. opening: the coordinator's call. infos: the servers, from the fleet."""
        settings, view = self.context.settings, self.context.view
        address, incarnation = ray_door.call(opening, "the coordinator")
        spec = run_spec(settings, self.start.run_id, incarnation, address)
        self._spec = spec.model_copy(update={"shared_retrievers": servers.shared_retrievers(infos)})
        calls = servers.ServerCalls(
            engine, self._coordinator, push_to=lambda names: self._ranks[0].ask("push_to", names)
        )
        record = self.start.folder / SEARCH_INDEX
        is_shared = self._topology.shares_devices
        index = settings.retriever.other_index
        self._servers = RunServers(
            infos,
            self._spec,
            calls,
            index,
            record=record,
            share_devices=is_shared,
            tools=self.context.services.get(TOOL_LIST, ""),
            refuse_other_tools=settings.eval.answers is not None,
        )
        if self._servers.names:
            view.show_phase("attaching rollout servers")
            if late := ", ".join(self._servers.late_names):
                view.message(f"{late} is still starting: the run continues with the other rollout servers.")
            attached = servers.attach_servers(self._servers.ready_names, self._spec)
            self._show_messages(self._servers.note_attached(attached))

    def _place(self) -> RunPlace:
        return RunPlace(
            run_id=self.start.run_id,
            incarnation=self._spec.incarnation,
            coordinator_address=self._spec.coordinator_address,
            servers=self._servers.ready_names,
            weights_backend=self._topology.backend,
            shares_devices=self._topology.shares_devices,
        )

    def _check_servers(self, ranks: RankWatch) -> None:
        """Restart servers that ended. Raises: OperatorError when none serves or may serve later."""
        # A server that starts takes its share of a shared device, which must not happen while a rank trains there.
        if not self._topology.shares_devices or ranks.phases[0].startswith(WAITING_FOR_BATCH):
            self._show_messages(self._servers.poll())
        if not self._servers.may_serve:
            raise OperatorError("Every rollout server failed; see their logs with deploy.cluster status.")

    def _finished_ranks(self, training: dict[Any, str], ranks: RankWatch) -> list[str]:
        """Return the names of ranks that returned. Raises: NeighbourError with the first that crashed, if known."""
        try:
            return ray_door.wait_any(training, _POLL_S)
        except NeighbourError as error:
            # Ranks end with their coordinator: if it is gone too, it crashed first.
            ray_door.call(self._coordinator.status.remote(), "the coordinator")
            if (explained := ranks.explain(error)) is error:
                raise
            raise explained from error

    def _show(self, is_final: bool = False) -> RunStatus:
        """Show the run's state, new metrics, and notices of the coordinator and of copied checkpoints."""
        lines = self.context.metrics.new_lines()
        status: RunStatus = ray_door.call(self._coordinator.status.remote(is_final), "the coordinator")
        write_status(self.start.folder, status)
        self.context.view.update(status, lines)
        self._show_messages(status.notices[self._num_shown :])
        self._num_shown = len(status.notices)
        for line in lines:
            self.step = max(self.step, int(line["step"]))
            self.context.record(line)
        if self.context.copies is not None:
            self._show_messages(self.context.copies.take_notices())
        return status

    def _show_messages(self, messages: Any) -> None:
        for text in messages:
            self.context.view.message(text)

    def _await(self, references: dict[Any, str]) -> None:
        """Wait for start-up calls and show the phase of rank 0. Raises: a call's error; NeighbourError when late."""
        limit_s = self.context.settings.rollout.start_timeout_s
        started = time.monotonic()
        deadline = started + limit_s
        waiting = dict(references)
        while waiting:
            finished = ray_door.wait_any(waiting, _POLL_S)
            waiting = {reference: name for reference, name in waiting.items() if name not in finished}
            if self.context.stop.is_set():
                raise StoppedAtStart
            check_cluster(self.context.cluster)
            phase, is_moving = self._phase()
            names = ", ".join(sorted(waiting.values()))
            # While a rank works, such as on its warm start, the run does not wait for a server alone.
            is_fleet_last = "the fleet" in waiting.values() and not any(r.name in waiting.values() for r in self._ranks)
            slowest = fleet.describe_wait(time.monotonic() - started) if is_fleet_last else ""
            self.context.view.show_phase(f"{phase}; waiting for {names}{slowest}" if waiting else phase)
            if is_moving:
                deadline = time.monotonic() + limit_s
            if time.monotonic() > deadline:
                raise NeighbourError(names, f"not ready within {limit_s:g} s")

    def _phase(self) -> tuple[str, bool]:
        """Return the phase of the first rank and whether it changed; without ranks, what is started."""
        if not self._ranks:
            return "starting rollout servers", False
        first = self._ranks[0]
        phase, is_moving = ray_door.call(first.ask("progress"), first.name, 120.0)
        return str(phase), bool(is_moving)


def describe_loss(start: RunStart, step: int, drain_s: float) -> str:
    """Return the end of a run that was stopped before its checkpoint was there. step: the last that ended."""
    own = newer_than(start.folder / CHECKPOINTS, start.step)
    saved = step_of(own[0]) if own else start.step
    lost = f" Lost: steps {saved + 1} to {step}." if step > saved else ""
    return (
        f"Stopped. A step or its checkpoint took longer than run.drain_s = {drain_s:g} s and was dropped.{lost} "
        f"A resume continues after step {saved}."
    )


def await_plan(context: RunContext) -> Topology:
    """Return the plan for the nodes that are there now, as soon as they can hold the run.

    Blocks for 180 s at most.
    Raises: OperatorError with the reason; StoppedAtStart; NeighbourError when the cluster is gone.
    """
    deadline = time.monotonic() + _NODES_S
    while True:
        try:
            return plan_topology(context.settings, context.sizes, ray_door.nodes())
        except SettingsError as error:
            if time.monotonic() > deadline:
                raise OperatorError(f"The cluster's nodes cannot hold the run any more. {error}") from None
            context.view.show_phase(f"waiting for nodes: {' '.join(str(error).split())}")
        if context.stop.wait(_POLL_S):
            raise StoppedAtStart
        check_cluster(context.cluster)
