"""One start of a run: its coordinator and ranks, launched, watched and ended. The rollout servers outlive it."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from learner.cluster import fleet, processes, ray_door, servers
from learner.cluster.cluster_end import check_cluster
from learner.cluster.models import run_models
from learner.plan.processes import Topology
from learner.rank.place import WAITING_FOR_BATCH, RunPlace
from learner.run.await_plan import Stopped, await_plan
from learner.run.changes import Changes, Moved
from learner.run.rank_watch import RankWatch
from learner.run.same_index import SameIndex
from learner.run.server_watch import ServerWatch
from protocol.errors import NeighbourError, OperatorError
from protocol.settings.run_spec import EngineRequest, RunSpec, engine_request, run_spec

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from learner.run.context import RunContext
    from learner.run.start import RunStart

_POLL_S = 0.5
_SERVER_CHECK_S = 2.0
# The fleet's processes import torch before they are lent.
_IMPORT_S = 180.0


@dataclass
class RunAttempt:
    """Call order: launch, watch, end; `end` whatever happened before."""

    context: RunContext  # what all attempts of the run have in common
    start: RunStart  # where this one starts from
    step: int = 0  # the last step that was seen to end
    _coordinator: Any = None
    _ranks: list[processes.Rank] = field(default_factory=list)
    _servers: list[str] = field(default_factory=list)
    _late: list[str] = field(default_factory=list)  # of those: which were not started yet when the run went on
    _spec: RunSpec | None = None
    _indexes: SameIndex = field(init=False)  # that its servers search
    _engine: EngineRequest | None = None  # of its rollout servers; None: it has none
    _topology: Topology | None = None  # as the cluster's nodes were when it was launched
    _num_told: int = 0  # of the coordinator's news

    def launch(self) -> None:
        """Start everything: servers and ranks side by side, or where they share devices one after the other.

        Raises: what one of them raised; Stopped.
        """
        settings, folder = self.context.settings, self.start.folder.resolve()
        fleet.await_fleet()
        topology = self._topology = await_plan(self.context)
        self._coordinator = processes.place_coordinator(
            settings, folder, self.start.run_id, self.start.step, self.context.cluster.node_ip, self.context.vocab_size
        )
        opening = self._coordinator.open.remote()
        fleet.be_admitted(self._coordinator)
        found = run_models(settings, self.context.model)
        on = {"on_cpus": not topology.has_gpus, "shares_device": topology.shares_devices and topology.has_gpus}
        engine = engine_request(settings, self.context.model, topology.backend, **on)
        self._engine = engine if topology.servers.count else None
        if topology.shares_devices:
            self.context.view.show_phase("starting rollout servers")
            ensuring = servers.ensure_servers(engine, topology.servers)
            self._await({opening: "the coordinator", ensuring: "the fleet"})
            self._attach(opening, ray_door.call(ensuring, "the fleet"))
            assert self._spec is not None
            servers.put_to_sleep(self._servers, self._spec)  # the ranks load their models in their place
            self._await(self._preparing(found, folder))
            return
        borrowing = processes.borrow_processes(topology.ranks, self._coordinator)
        # A run that goes on need not wait for a server that loads its model where others are ready.
        goes_on = self.start.checkpoint is not None
        ensuring = servers.ensure_servers(engine, topology.servers, goes_on) if topology.servers.count else None
        self.context.view.show_phase(f"starting learner ranks{' and rollout servers' if ensuring else ''}")
        waiting = {opening: "the coordinator", **({ensuring: "the fleet"} if ensuring else {})}
        self._await(waiting | self._preparing(found, folder, borrowing))
        self._attach(opening, ray_door.call(ensuring, "the fleet") if ensuring else [])

    def _preparing(self, found: Any, folder: Path, borrowing: Any = None) -> dict[Any, str]:
        """Make the ranks and have them load their models; returns what is to be awaited. found: models by setting."""
        assert self._topology is not None
        borrowing = borrowing or processes.borrow_processes(self._topology.ranks, self._coordinator)
        borrowed = ray_door.call(borrowing, "the fleet", _IMPORT_S)
        self._ranks = processes.make_ranks(borrowed, self._topology, self.context.settings, folder, found)
        return {rank.ask("prepare", self.start.checkpoint): rank.name for rank in self._ranks}

    def _attach(self, opening: Any, ready: Any) -> None:
        """Tell the servers of the run. opening: the coordinator's. ready: the servers, as the fleet says."""
        settings = self.context.settings
        self._indexes = SameIndex(settings.retriever.other_index)
        self._servers = [server["name"] for server in ready]
        self._late = [server["name"] for server in ready if not server["is_started"]]
        address, incarnation = ray_door.call(opening, "the coordinator")
        spec = run_spec(settings, self.start.run_id, incarnation, address)
        self._spec = spec.model_copy(update={"shared_retrievers": servers.shared_retrievers(ready)})
        if self._servers:
            self.context.view.show_phase("attaching rollout servers")
            if self._late:
                late = f"{', '.join(self._late)} is being started, and serves when it is ready"
                self.context.view.message(f"{late}: the run goes on with the other rollout servers.")
            self._note_attached(servers.attach_servers(self._in_time, self._spec))

    def _note_attached(self, runs: Mapping[str, Mapping[str, Any]]) -> None:
        """Show what servers say of the run. Raises: OperatorError when one may not serve."""
        for name, run in runs.items():
            if "base_url" in run:
                self.context.view.message(f"{name}: agents generate at {run['base_url']}")
        if (warning := self._indexes.take({name: run["content_hash"] for name, run in runs.items()})) is not None:
            self.context.view.message(warning)

    def watch(self) -> str:
        """Show the run until all ranks have returned; returns how it ended.

        Raises: what ended a rank or the coordinator; Moved when ranks left a drained node.
        """
        assert self._spec is not None
        assert self._topology is not None
        place = self._place()
        training = {rank.ask("train", place): rank.name for rank in self._ranks}
        first = next(iter(training))
        files = self._engine.files if self._engine is not None else None
        watched = ServerWatch(self._in_time, self._spec, self._lose_server, check=self._note_attached, files=files)
        watched.add(self._late)
        changes = self._changes_of(watched)
        ranks = RankWatch(self._ranks, ray_door.is_done, ray_door.call)
        servers_at = drain_until = 0.0
        while training:
            finished = self._finished(training, ranks)
            training = {reference: who for reference, who in training.items() if who not in finished}
            self._show()
            now = time.monotonic()
            if now - servers_at > _SERVER_CHECK_S:
                servers_at = now
                check_cluster(self.context.cluster)
                # One that starts takes its part of a shared device: not while a rank trains there.
                if not self._topology.shares_devices or ranks.phases[0].startswith(WAITING_FOR_BATCH):
                    self._check_servers(watched)
                self._poll(changes)
                self._show_copies()
                ranks.poll()
            if drain_until and now > drain_until:
                return f"Stopped. The step after {self.step} did not end in time and was dropped."
            if self.context.stop.is_set() and not drain_until:
                drain_until = now + self.context.settings.run.drain_s
                self._coordinator.stop_after_step.remote("stopped by the user")
                self.context.view.message("Stopping after this step; again to stop at once.")
        self._show()
        self._show_copies()
        ended = str(ray_door.call(first, self._ranks[0].name))
        if (why := ray_door.call(self._coordinator.status.remote(), "the coordinator").gave_up) is not None:
            raise OperatorError(f"The run ended after step {self.step}. {why}")
        if changes.moving and not self.context.stop.is_set() and self.step < self.context.settings.run.max_steps:
            raise Moved(changes.moving)
        return ended

    def detach_servers(self) -> None:
        """Have the rollout servers forget the run; they stay warm for the next."""
        if self._servers:
            servers.detach_servers(self._servers)

    def end(self) -> None:
        """End coordinator and ranks; what the ledger was told is on disk afterwards."""
        try:
            if self._coordinator is not None:
                # It may be what died: everything it committed is on disk already then.
                with contextlib.suppress(NeighbourError, OperatorError):
                    ray_door.call(self._coordinator.close.remote(), "the coordinator")
        finally:
            processes.end(self._coordinator, self._ranks)

    def _place(self) -> RunPlace:
        """Return where ranks find the run."""
        assert self._spec is not None
        assert self._topology is not None
        return RunPlace(
            run_id=self.start.run_id,
            incarnation=self._spec.incarnation,
            coordinator_address=self._spec.coordinator_address,
            servers=self._in_time,
            num_servers=len(self._servers),
            weights_backend=self._topology.backend,
            shares_devices=self._topology.shares_devices,
        )

    @property
    def _in_time(self) -> tuple[str, ...]:
        """The rollout servers that were ready when the run began."""
        return tuple(name for name in self._servers if name not in self._late)

    def _phase(self) -> tuple[str, bool]:
        """Return what the first rank is at, and whether that changed; before there are ranks, what is started."""
        if not self._ranks:
            return "starting rollout servers", False
        first = self._ranks[0]
        phase, is_moving = ray_door.call(first.ask("progress"), first.name, 120.0)
        return str(phase), bool(is_moving)

    def _show_copies(self) -> None:
        """Show the news of the checkpoints' copies."""
        for text in self.context.copies.take_news() if self.context.copies is not None else ():
            self.context.view.message(text)

    def _finished(self, training: dict[Any, str], ranks: RankWatch) -> list[str]:
        """Return who of the ranks has returned. Raises: NeighbourError naming who died first, if one can tell."""
        try:
            return ray_door.wait_any(training, _POLL_S)
        except NeighbourError as error:
            # Ranks end with their coordinator: when it is gone too, it is what died.
            ray_door.call(self._coordinator.status.remote(), "the coordinator")
            raise ranks.explained(error) from error

    def _show(self) -> None:
        lines = self.context.metrics.new_lines()
        status = ray_door.call(self._coordinator.status.remote(), "the coordinator")
        self.context.view.update(status, lines)
        for text in status.news[self._num_told :]:
            self.context.view.message(text)
        self._num_told = len(status.news)
        for line in lines:
            self.step = max(self.step, int(line["step"]))
            self.context.record(line)

    def _lose_server(self, name: str, why: str) -> None:
        self._coordinator.lose_server.remote(name, why)

    def _check_servers(self, watch: ServerWatch) -> None:
        """Have servers that were restarted serve again. The run goes on while one serves, or may yet."""
        for message in watch.poll():
            self.context.view.message(message)
        if self._servers and not watch.num_hopeful:
            raise OperatorError("Every rollout server was given up; see their logs with deploy.cluster status.")

    def _changes_of(self, watch: ServerWatch) -> Changes:
        assert self._topology is not None
        topology, rank = self._topology, self._ranks[0]
        folder, names, engine = self.start.folder, self._servers, self._engine
        return Changes(self.context, folder, topology, names, self._late, watch, engine, rank, self._coordinator)

    def _poll(self, changes: Changes) -> None:
        for message in changes.poll():
            self.context.view.message(message)
        self._servers = changes.names
        self.context.changed.num_servers = len(self._servers)

    def _await(self, references: dict[Any, str]) -> None:
        """Wait for start-up calls, showing what rank 0 is at. Raises: what one raised; NeighbourError when late."""
        limit_s = self.context.settings.rollout.start_timeout_s
        deadline = time.monotonic() + limit_s
        waiting = dict(references)
        while waiting:
            finished = ray_door.wait_any(waiting, _POLL_S)
            waiting = {reference: who for reference, who in waiting.items() if who not in finished}
            if self.context.stop.is_set():
                raise Stopped
            check_cluster(self.context.cluster)
            phase, is_moving = self._phase()
            names = ", ".join(sorted(waiting.values()))
            asked = fleet.awaited() if "the fleet" in waiting.values() else ""
            self.context.view.show_phase(f"{phase}; waiting for {names}{asked}" if waiting else phase)
            if is_moving:
                deadline = time.monotonic() + limit_s
            if time.monotonic() > deadline:
                raise NeighbourError(names, f"not ready within {limit_s:g} s")
