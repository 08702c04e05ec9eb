"""The driver of a run: starts coordinator and ranks, attaches rollout servers, watches them all, and clears up.

Called by `learner.run`; `drive` is the table of contents of a run seen from outside.
"""

import contextlib
import os
import shutil
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
from protocol.settings import Settings

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
    num_gpus: int = 0
    backend: Literal["nccl", "gloo"] = "gloo"
    coordinator: Any = None
    ranks: list[Any] = field(default_factory=list)
    servers: list[str] = field(default_factory=list)
    spec: RunSpec | None = None
    wandb: WandbLog | None = None
    has_made_folder: bool = False
    is_training: bool = False


def drive(inspected: Inspected) -> int:
    """Run to the end; returns the exit status.

    Raises: OperatorError and NeighbourError, with everything ended. A run that failed before it trained leaves no new
    folder behind; one that failed later has its report.
    """
    cluster = read_cluster()
    # Ray reads how to authenticate when it is first imported: the environment comes before `learner.cluster`.
    os.environ |= cluster.ray_environment()
    from learner import cluster as ray_door

    ray_door.connect(cluster)
    with LiveView(inspected.settings.run.max_steps) as view, _signals() as stop:
        run = _Run(inspected, cluster, view, stop)
        if inspected.start.notice:
            view.message(inspected.start.notice)
        try:
            _check(run)
            _open_folder(run)
            _launch(run)
            ended = _watch(run)
        except _Stopped:
            ended = "Stopped before the first step."
        except BaseException:
            _end_failed(run)
            raise
        _clear_up(run)
    folder = inspected.start.folder
    report = write_report(folder, inspected.model)
    print(f"{ended} Run folder: {folder}. Report: {report}.")
    return 0


def _check(run: _Run) -> None:
    """Ask what only a running cluster can tell: nothing is started, nothing written."""
    from learner import cluster as ray_door

    inspected, settings = run.inspected, run.inspected.settings
    run.num_gpus = ray_door.num_gpus()
    run.backend = choose_backend(settings.weights.backend, run.num_gpus)
    check_gpus(settings, run.num_gpus)
    run.view.show_phase("asking reward services and retriever")
    ray_door.check_services(run_spec(settings, inspected.start.run_id, 0, "unset"))


def _open_folder(run: _Run) -> None:
    inspected = run.inspected
    run.has_made_folder = not inspected.start.folder.exists()
    prepare_folder(inspected.start, inspected.settings)
    run.wandb = _start_wandb(inspected)


def _launch(run: _Run) -> None:
    """Start everything: servers and ranks side by side."""
    from learner import cluster as ray_door

    inspected, settings = run.inspected, run.inspected.settings
    start = inspected.start
    run.coordinator = ray_door.place_coordinator(
        settings, start.folder.resolve(), start.run_id, start.step, run.cluster.node_ip
    )
    opening = run.coordinator.open.remote()
    servers = ray_door.ensure_servers(
        engine_request(settings, str(inspected.model), run.backend), settings.rollout.num_servers
    )
    run.view.show_phase("starting learner ranks and rollout servers")
    run.ranks = ray_door.place_ranks(settings, start.folder.resolve(), inspected.model, run.num_gpus > 0)
    preparing = {rank.prepare.remote(start.checkpoint): f"learner rank {i}" for i, rank in enumerate(run.ranks)}
    _await(run, {opening: "the coordinator", servers: "the fleet", **preparing}, settings.rollout.start_timeout_s)
    run.servers = [server["name"] for server in ray_door.call(servers, "the fleet")]
    address, incarnation = ray_door.call(opening, "the coordinator")
    run.spec = run_spec(settings, start.run_id, incarnation, address)
    run.view.show_phase("attaching rollout servers")
    ray_door.attach_servers(run.servers, run.spec)


def _watch(run: _Run) -> str:
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
    )
    run.is_training = True
    training = {rank.train.remote(place): f"learner rank {i}" for i, rank in enumerate(run.ranks)}
    first = next(iter(training))
    watch = ServerWatch(run.servers, run.spec, lambda name, why: run.coordinator.lose_server.remote(name, why))
    metrics = MetricsReader(start.folder / "metrics.jsonl")
    servers_at = drain_until = 0.0
    while training:
        finished = ray_door.wait_any(training, _POLL_S)
        training = {reference: who for reference, who in training.items() if who not in finished}
        _show(run, metrics)
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
    _show(run, metrics)
    return str(ray_door.call(first, "learner rank 0"))


def _show(run: _Run, metrics: MetricsReader) -> None:
    from learner import cluster as ray_door

    lines = metrics.new_lines()
    run.view.update(ray_door.call(run.coordinator.status.remote(), "the coordinator"), lines)
    for line in lines:
        if run.wandb is not None:
            run.wandb.log(line)


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

    try:
        if run.servers:
            ray_door.detach_servers(run.servers)
        if run.coordinator is not None:
            ray_door.call(run.coordinator.close.remote(), "the coordinator")
        if run.wandb is not None:
            run.wandb.close()
    finally:
        ray_door.end([*run.ranks, *([run.coordinator] if run.coordinator is not None else [])])


def _end_failed(run: _Run) -> None:
    """End what was started after an error, which the caller raises on: nothing here may take its place."""
    folder = run.inspected.start.folder
    with contextlib.suppress(NeighbourError, OperatorError):
        _clear_up(run)
    if run.is_training:
        try:
            report = write_report(folder, run.inspected.model)
            run.view.message(f"The run failed. Run folder: {folder}. Report: {report}.")
        except Exception as error:  # whatever it is, what ended the run is what the caller must see
            run.view.message(f"The run failed, and its report could not be written: {error}")
    elif run.has_made_folder:
        shutil.rmtree(folder, ignore_errors=True)


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


def check_gpus(settings: Settings, num_gpus: int) -> None:
    """Raise SettingsError for more GPUs than the cluster has: Ray would wait for them until a deadline.

    Without any GPU everything runs on CPUs.
    """
    ranks, rollout = settings.learner.num_ranks, settings.rollout
    for_servers = rollout.num_servers * rollout.tensor_parallel_size
    if num_gpus and ranks + for_servers > num_gpus:
        raise SettingsError(
            f"settings: learner.num_ranks = {ranks} and rollout.num_servers = {rollout.num_servers} with "
            f"rollout.tensor_parallel_size = {rollout.tensor_parallel_size} need {ranks + for_servers} GPUs; "
            f"the cluster has {num_gpus}. Lower one of them."
        )


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
