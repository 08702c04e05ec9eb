"""The driver of a run: starts coordinator and ranks, attaches rollout servers, watches them all, and clears up.

Called by `learner.run`; `drive` is the table of contents of a run seen from outside.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from learner.live_view import LiveView, MetricsReader
from learner.preflight import Inspected
from learner.rank_process import RunPlace
from learner.report import write_report
from learner.run_folder import prepare_folder
from learner.wandb_log import WandbLog
from protocol.errors import NeighbourError, OperatorError, SettingsError
from protocol.home import ClusterState, read_cluster
from protocol.run_spec import RunSpec, engine_request, run_spec
from protocol.settings_loader import save_settings

if TYPE_CHECKING:
    from learner.server_watch import ServerWatch

_POLL_S = 0.5
_SERVER_CHECK_S = 2.0


class _Stopped(Exception):
    """Ctrl-C or SIGTERM came while the run was still starting."""


@dataclass
class _Run:
    """What has been started so far, so that all of it is ended whatever happens."""

    inspected: Inspected
    cluster: ClusterState
    view: LiveView
    stop: threading.Event
    backend: str = "gloo"
    coordinator: Any = None
    ranks: list[Any] = field(default_factory=list)
    servers: list[str] = field(default_factory=list)
    spec: RunSpec | None = None


def drive(inspected: Inspected) -> int:
    """Run to the end; returns the exit status. Raises: OperatorError and NeighbourError, with everything ended."""
    cluster = read_cluster()
    # Ray reads how to authenticate when it is first imported: the environment comes before `learner.cluster`.
    os.environ |= cluster.ray_environment()
    from learner import cluster as ray_door

    folder = inspected.start.folder
    prepare_folder(inspected.start)
    save_settings(inspected.settings, folder / "settings.yaml")
    ray_door.connect(cluster)
    wandb = _start_wandb(inspected)
    with LiveView(inspected.settings.run.max_steps) as view, _signals() as stop:
        run = _Run(inspected, cluster, view, stop)
        if inspected.start.notice:
            view.message(inspected.start.notice)
        try:
            _launch(run)
            ended = _watch(run, wandb)
        except _Stopped:
            ended = "Stopped before the first step."
        finally:
            _clear_up(run)
            if wandb is not None:
                wandb.close()
    report = write_report(folder, inspected.model)
    print(f"{ended} Run folder: {folder}. Report: {report}.")
    return 0


def _launch(run: _Run) -> None:
    """Start everything: services are asked first, then servers and ranks start side by side."""
    from learner import cluster as ray_door

    inspected, settings = run.inspected, run.inspected.settings
    gpus = ray_door.num_gpus()
    run.backend = choose_backend(settings.weights.backend, gpus)
    start = inspected.start
    run.view.show_phase("asking reward services and retriever")
    ray_door.check_services(run_spec(settings, start.run_id, 0, "unset"))
    run.coordinator = ray_door.place_coordinator(
        settings, start.folder.resolve(), start.run_id, start.step, run.cluster.node_ip
    )
    servers = ray_door.ensure_servers(
        engine_request(settings, str(inspected.model), run.backend), settings.rollout.num_servers
    )
    run.view.show_phase("starting learner ranks and rollout servers")
    run.ranks = ray_door.place_ranks(settings, start.folder.resolve(), inspected.model, run.cluster.node_ip, gpus > 0)
    preparing = {rank.prepare.remote(start.checkpoint): f"learner rank {i}" for i, rank in enumerate(run.ranks)}
    _await(run, {servers: "the fleet", **preparing}, settings.rollout.start_timeout_s)
    run.servers = [server["name"] for server in ray_door.call(servers, "the fleet")]
    address, incarnation = ray_door.call(run.coordinator.describe.remote(), "the coordinator")
    run.spec = run_spec(settings, start.run_id, incarnation, address)
    run.view.show_phase("attaching rollout servers")
    ray_door.attach_servers(run.servers, run.spec)


def _watch(run: _Run, wandb: WandbLog | None) -> str:
    """Show the run until all ranks have returned; returns how it ended. Raises what ended a rank or the coordinator."""
    from learner import cluster as ray_door
    from learner.server_watch import ServerWatch

    start, settings = run.inspected.start, run.inspected.settings
    assert run.spec is not None
    place = RunPlace(
        run_id=start.run_id,
        incarnation=run.spec.incarnation,
        coordinator_address=run.spec.coordinator_address,
        servers=tuple(run.servers),
        weights_backend=run.backend,
        host=run.cluster.node_ip,
    )
    training = {rank.train.remote(place): f"learner rank {i}" for i, rank in enumerate(run.ranks)}
    first = next(iter(training))
    watch = ServerWatch(run.servers, run.spec, lambda name, why: run.coordinator.lose_server.remote(name, why))
    metrics = MetricsReader(start.folder / "metrics.jsonl")
    servers_at = drain_until = 0.0
    while training:
        finished = ray_door.wait_any(training, _POLL_S)
        training = {reference: who for reference, who in training.items() if who not in finished}
        _show(run, metrics, wandb)
        now = time.monotonic()
        if now - servers_at > _SERVER_CHECK_S:
            servers_at = now
            _check_servers(run, watch)
        if run.stop.is_set() and not drain_until:
            drain_until = now + settings.run.drain_s
            run.coordinator.stop_after_step.remote("stopped by the user")
            run.view.message("Stopping after this step; again to stop at once.")
        if drain_until and now > drain_until:
            raise OperatorError(f"The step under way did not end within run.drain_s = {settings.run.drain_s:g} s.")
    _show(run, metrics, wandb)
    return str(ray_door.call(first, "learner rank 0"))


def _show(run: _Run, metrics: MetricsReader, wandb: WandbLog | None) -> None:
    from learner import cluster as ray_door

    lines = metrics.new_lines()
    run.view.update(ray_door.call(run.coordinator.status.remote(), "the coordinator"), lines)
    for line in lines:
        if wandb is not None:
            wandb.log(line)


def _check_servers(run: _Run, watch: "ServerWatch") -> None:
    """Have servers that were restarted serve again. The run goes on while one serves, or may yet."""
    for message in watch.poll():
        run.view.message(message)
    if not watch.num_hopeful:
        raise NeighbourError("rollout", "every rollout server was given up; see their logs with deploy.cluster status")


def _await(run: _Run, references: dict[Any, str], timeout_s: float) -> None:
    """Wait for start-up calls, showing what rank 0 is at. Raises: what one of them raised; NeighbourError when late."""
    from learner import cluster as ray_door

    deadline = time.monotonic() + timeout_s
    waiting = dict(references)
    while waiting:
        finished = ray_door.wait_any(waiting, _POLL_S)
        waiting = {reference: who for reference, who in waiting.items() if who not in finished}
        if run.stop.is_set():
            raise _Stopped
        phase, is_moving = ray_door.call(run.ranks[0].progress.remote(), "learner rank 0", 120.0)
        run.view.show_phase(f"{phase}; waiting for {', '.join(sorted(waiting.values()))}" if waiting else phase)
        if is_moving:
            deadline = time.monotonic() + timeout_s
        if time.monotonic() > deadline:
            raise NeighbourError(", ".join(sorted(waiting.values())), f"not ready within {timeout_s:g} s")


def _clear_up(run: _Run) -> None:
    """End this run's processes; the rollout servers stay warm for the next."""
    from learner import cluster as ray_door

    if run.servers:
        ray_door.detach_servers(run.servers)
    if run.coordinator is not None:
        with contextlib.suppress(NeighbourError):  # it is dead: there is nothing left to close
            ray_door.call(run.coordinator.close.remote(), "the coordinator")
    ray_door.end([*run.ranks, *([run.coordinator] if run.coordinator is not None else [])])


def choose_backend(wanted: str, num_gpus: int) -> Literal["nccl", "gloo"]:
    """Return how weights travel. Raises: SettingsError when the cluster cannot do what was asked for."""
    if wanted == "ipc":
        raise SettingsError(
            "settings: weights.backend = ipc needs learner and engine on one GPU; Sluice places them apart. "
            "Use auto or nccl."
        )
    if wanted == "nccl" and not num_gpus:
        raise SettingsError("settings: weights.backend = nccl needs GPUs, and this cluster has none. Use auto or gloo.")
    if wanted == "auto":
        return "nccl" if num_gpus else "gloo"
    return "nccl" if wanted == "nccl" else "gloo"


def _start_wandb(inspected: Inspected) -> WandbLog | None:
    project = inspected.settings.report.wandb_project
    if project is None:
        return None
    start = inspected.start
    return WandbLog(project, start.run_id, inspected.settings.model_dump(mode="json"), start.folder)


@contextlib.contextmanager
def _signals() -> Iterator[threading.Event]:
    """Turn the first Ctrl-C or SIGTERM into an event; the second Ctrl-C interrupts as usual."""
    stop = threading.Event()

    def note(number: int, _: object) -> None:
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
