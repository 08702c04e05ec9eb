"""The driver of a run: checks it, lives it, and lives it again from the newest checkpoint when something in it died.

Everything that touches Ray is
imported late: Ray reads how to authenticate when it is first imported.
"""

import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from learner.disk.metrics_lines import MetricsReader
from learner.disk.model_folder import read_vocab_size
from learner.live.view import LiveView
from learner.live.wandb_log import WandbLog
from learner.report.write import write_report
from learner.run.preflight import Inspected
from learner.run.start import RunStart, held, plan_restart, prepare_folder
from protocol.errors import NeighbourError, OperatorError, SettingsError
from protocol.node.home import ClusterState, read_cluster
from protocol.settings.run_spec import run_spec
from protocol.settings.settings import Settings

if TYPE_CHECKING:
    from learner.run.life import RunLife, Surroundings


@dataclass
class _Run:
    """What the user asked for, and what stands of it in the run folder."""

    inspected: Inspected
    view: LiveView
    wandb: WandbLog | None = None
    has_made_folder: bool = False
    has_trained: bool = False


def drive(inspected: Inspected) -> int:
    """Run to the end; returns the exit status.

    Raises: OperatorError and NeighbourError, with everything ended. A run that failed before it trained leaves no new
    folder behind; one that failed later has its report.
    """
    cluster = read_cluster()
    os.environ |= cluster.ray_environment()
    from learner.run import ray_door

    ray_door.connect(cluster)
    with LiveView(inspected.settings.run.max_steps) as view, _signals() as stop:
        run = _Run(inspected, view)
        if inspected.start.notice:
            view.message(inspected.start.notice)
        try:
            around = _look_around(run, cluster, stop)
            run.has_made_folder = not inspected.start.folder.exists()
            with held(inspected.start.folder):
                prepare_folder(inspected.start, inspected.settings)
                run.wandb = _start_wandb(inspected)
                ended = _live(run, around)
        except BaseException:
            _end_failed(run)
            raise
        finally:
            ray_door.disconnect()
            if run.wandb is not None:
                run.wandb.close()
    folder = inspected.start.folder
    report = write_report(folder, inspected.model)
    print(f"{ended} Run folder: {folder}. Report: {report}.")
    return 0


def _look_around(run: _Run, cluster: ClusterState, stop: threading.Event) -> "Surroundings":
    """Ask what only a running cluster can tell: nothing is started, nothing written."""
    from learner.run import fleet, ray_door
    from learner.run.life import Surroundings

    inspected, settings = run.inspected, run.inspected.settings
    num_gpus = ray_door.num_gpus()
    backend = choose_backend(settings.weights.backend, num_gpus)
    check_gpus(settings, num_gpus)
    if fleet.renew_fleet():
        run.view.message("The code has changed since the cluster was started: what runs other code is started anew.")
    run.view.show_phase("asking reward services and retriever")
    fleet.check_services(run_spec(settings, inspected.start.run_id, 0, "unset"))
    return Surroundings(
        settings=settings,
        model=inspected.model,
        vocab_size=read_vocab_size(inspected.model),
        node_ip=cluster.node_ip,
        num_gpus=num_gpus,
        backend=backend,
        view=run.view,
        stop=stop,
        metrics=MetricsReader(inspected.start.folder / "metrics.jsonl"),
        record=lambda line: run.wandb.log(line) if run.wandb is not None else None,
    )


def _live(run: _Run, around: "Surroundings") -> str:
    """Return how the run ended. A death after training began is followed by another life, while lives get further.

    Raises: what ended the last life. However it ends, no process of the run is left, and the servers stay warm.
    """
    from learner.run.life import RunLife, Stopped

    start, furthest, num_restarts = run.inspected.start, -1, 0
    while True:
        life = RunLife(around, start)
        try:
            life.launch()
            run.has_trained = True
            ended = life.watch()
        except Stopped:
            ended = "Stopped before the first step."
        except NeighbourError as error:
            num_restarts = 1 if life.step > furthest else num_restarts + 1
            furthest = max(furthest, life.step)
            if not run.has_trained or num_restarts > run.inspected.settings.run.max_restarts:
                _end_life(life)
                raise
            life.end()
            start = _restart(run, around, start, error)
            continue
        except BaseException:
            _end_life(life)
            raise
        life.detach_servers()
        life.end()
        return ended


def _end_life(life: "RunLife") -> None:
    """End a life after an error, which the caller raises on: nothing here may take its place."""
    with contextlib.suppress(NeighbourError, OperatorError):
        life.detach_servers()
    with contextlib.suppress(NeighbourError, OperatorError):
        life.end()


def _restart(run: _Run, around: "Surroundings", start: RunStart, error: NeighbourError) -> RunStart:
    """Put the run folder back to the newest checkpoint; returns where the next life starts."""
    start = plan_restart(start)
    run.view.message(f"{' '.join(str(error).split())[:300]}. Going on from step {start.step}.")
    prepare_folder(start, run.inspected.settings)
    around.metrics.skip_known()
    return start


def _end_failed(run: _Run) -> None:
    """Leave a report, or no folder, after an error, which the caller raises on: nothing here may take its place."""
    folder = run.inspected.start.folder
    if run.has_trained:
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
