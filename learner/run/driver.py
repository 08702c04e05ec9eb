"""The driver of a run: checks it, starts it, and starts it again from the newest checkpoint when something in it died.

Everything that touches Ray is
imported late: Ray reads how to authenticate when it is first imported.
"""

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from learner.checkpoint.manifest import RefusedCheckpointError
from learner.cluster.cluster_end import cluster_end
from learner.disk.metrics_lines import MetricsReader
from learner.disk.model_folder import read_vocab_size
from learner.live.alarms import HealthWatch
from learner.live.view import LiveView
from learner.live.wandb_log import WandbLog
from learner.plan.memory import read_sizes
from learner.plan.needs import needs_of
from learner.plan.topology import plan_topology
from learner.report.write import write_report
from learner.run.checks.preflight import Inspected
from learner.run.copied_start import copier_of
from learner.run.start import RunStart, locked, plan_restart, prepare_folder, set_refused_aside
from learner.run.terminal import say, stop_signals
from protocol.errors import NeighbourError, OperatorError
from protocol.node.current_run import using_cluster
from protocol.node.home import ClusterState, read_cluster
from protocol.settings.run_spec import run_spec

if TYPE_CHECKING:
    from learner.run.attempt import RunAttempt
    from learner.run.context import RunContext


@dataclass
class _Progress:
    """What stands of the run in its folder."""

    has_made_folder: bool = False
    has_trained: bool = False


def drive(inspected: Inspected) -> int:
    """Run to the end; returns the exit status.

    Raises: OperatorError and NeighbourError, with everything ended. A run that failed before it trained leaves no new
    folder behind; one that failed later has its report.
    """
    cluster = read_cluster()
    if (end := cluster_end(cluster)) is not None:
        raise OperatorError(f"{end}. Start the cluster with deploy/start_cluster.sh.")
    start, settings, progress = inspected.start, inspected.settings, _Progress()
    os.environ |= cluster.ray_environment()
    from learner.cluster import ray_door

    with (
        using_cluster(start.run_id, start.folder),
        ray_door.connected(cluster),
        stop_signals() as stop,  # after Ray, which takes SIGTERM for itself when it connects
        LiveView(settings.run.max_steps) as view,
        contextlib.closing(_Pages(inspected, view)) as pages,
    ):
        for notice in inspected.notices:
            view.message(notice)
        try:
            context = check_cluster(inspected, cluster, view, stop, pages.record)
            is_new = not start.folder.exists()
            with locked(start):
                progress.has_made_folder = is_new  # with the lock: nobody else's is removed when this one fails
                prepare_folder(start, settings)
                if inspected.train is not None:
                    inspected.train.save(start.folder)
                pages.open()
                ended = _run_attempts(start, context, progress) + _last_copy(context)
        except BaseException as error:
            _end_failed(inspected, progress, view, error)
            raise
    report = write_report(start.folder, inspected.model)
    say(f"{ended} Run folder: {start.folder}. Report: {report}.{pages.where}")
    return 0


class _Pages:
    """Where lines of metrics go beside the view: alarms that they raise, and the run's page at Weights & Biases."""

    def __init__(self, inspected: Inspected, view: LiveView) -> None:
        self._inspected = inspected
        self._view = view
        self._health = HealthWatch(inspected.settings.health)
        self._started_at = time.time()
        self._wandb: WandbLog | None = None

    @property
    def where(self) -> str:
        """Where the page is, as a sentence to follow another; empty without one."""
        return "" if self._wandb is None else f" {self._wandb.where}"

    def open(self) -> None:
        """Begin the page, or go on with the one in the run folder."""
        settings, start = self._inspected.settings, self._inspected.start
        if (project := settings.report.wandb_project) is not None:
            self._wandb = WandbLog(project, start.run_id, settings.model_dump(mode="json"), start.folder)

    def record(self, line: dict[str, float]) -> None:
        if self._wandb is not None:
            self._wandb.log(line)
        for alarm in self._health.take(line) if "loss" in line else ():
            if line.get("at_s", self._started_at) < self._started_at:
                continue  # an earlier start's: it was told then
            self._view.message(f"Alarm at step {line['step']:.0f}: {alarm.text}")
            if self._wandb is not None:
                self._wandb.alert(f"{alarm.name} at step {line['step']:.0f}", alarm.text)

    def close(self) -> None:
        if self._wandb is not None:
            self._wandb.close()


def check_cluster(
    inspected: Inspected,
    cluster: ClusterState,
    view: LiveView,
    stop: threading.Event,
    record: Callable[[dict[str, float]], None],
) -> "RunContext":
    """Ask what only a running cluster can tell: nothing is started, nothing written. Raises: what is wrong with it."""
    from learner.cluster import fleet, ray_door
    from learner.run.await_plan import Stopped, await_nodes
    from learner.run.context import RunContext

    settings = inspected.settings
    sizes = read_sizes(settings, inspected.model)
    if inspected.start.seen:  # it ran before: a node of it may be on its way back
        with contextlib.suppress(Stopped):  # which the attempt finds, and says
            await_nodes(lambda: plan_topology(settings, sizes, ray_door.nodes()), view, stop, cluster)
    else:
        with ray_door.naming_drained():
            plan_topology(settings, sizes, ray_door.nodes())
    fleet.await_idle_fleet()
    if fleet.renew_fleet():
        view.message("The code has changed since the cluster was started: what runs other code is started anew.")
    if needs_of(settings).rollouts:
        view.show_phase("asking reward services and retriever")
        fleet.check_services(run_spec(settings, inspected.start.run_id, 0, "unset"))
    return RunContext(
        settings=settings,
        model=inspected.model,
        vocab_size=read_vocab_size(inspected.model),
        cluster=cluster,
        sizes=sizes,
        view=view,
        stop=stop,
        metrics=MetricsReader(inspected.start.folder / "metrics.jsonl"),
        record=record,
        copies=copier_of(settings, inspected.start),
    )


def _run_attempts(start: RunStart, context: "RunContext", progress: _Progress) -> str:
    """Return how the run ended. A death after training began is followed by another attempt, while they get further.

    A death while a run that has a checkpoint starts is followed by one attempt more: its settings may be what is wrong.
    Raises: what ended the last attempt. However it ends, no process of the run is left, and the servers stay warm.
    """
    from learner.run.attempt import RunAttempt
    from learner.run.await_plan import Stopped
    from learner.run.changes import Moved

    furthest, num_restarts = -1, 0
    while True:
        attempt = RunAttempt(context, start)
        if context.copies is not None:
            context.copies.goes_on_from(start.step)
        try:
            attempt.launch()
            progress.has_trained = True
            ended = attempt.watch()
        except Stopped:
            ended = "Stopped before the first step."
        except Moved as reason:
            attempt.end()
            start = _restart(context, start, reason)
            continue
        except RefusedCheckpointError as error:
            attempt.end()
            set_refused_aside(start, error)
            start = _restart(context, start, error)
            continue
        except NeighbourError as error:
            if (gone := cluster_end(context.cluster)) is not None:
                raise _cluster_ended(gone, start) from error
            num_restarts = 1 if attempt.step > furthest else num_restarts + 1
            furthest = max(furthest, attempt.step)
            if num_restarts > _most_restarts(context, start, progress):
                _end_attempt(attempt)
                raise
            attempt.end()
            start = _restart(context, start, error)
            continue
        except BaseException:
            _end_attempt(attempt)
            raise
        attempt.detach_servers()
        attempt.end()
        return ended


def _most_restarts(context: "RunContext", start: RunStart, progress: _Progress) -> int:
    if progress.has_trained:
        return context.settings.run.max_restarts
    return min(1, context.settings.run.max_restarts) if start.checkpoint is not None else 0


def _last_copy(context: "RunContext") -> str:
    """Wait for the copy of the last checkpoint; returns what is to be said when there is none, to follow a sentence."""
    if context.copies is None:
        return ""
    context.view.show_phase("copying the last checkpoint")
    missing = context.copies.finish(context.stop.is_set, context.settings.run.drain_s)
    return f" {missing}" if missing else ""


def _cluster_ended(gone: str, start: RunStart) -> OperatorError:
    """Return what to say when the cluster is no more: nothing of the run is left to be ended."""
    saved = plan_restart(start).step
    return OperatorError(
        f"The cluster was stopped, or died, during the run: {gone}. Start it with deploy/start_cluster.sh and give "
        f"this command again: the run goes on from {f'the checkpoint of step {saved}' if saved else 'its start'}."
    )


def _end_attempt(attempt: "RunAttempt") -> None:
    """End an attempt after an error, which the caller raises on: nothing here may take its place."""
    if cluster_end(attempt.context.cluster) is not None:
        return  # each call would wait a minute for what is gone
    with contextlib.suppress(NeighbourError, OperatorError):
        attempt.detach_servers()
    with contextlib.suppress(NeighbourError, OperatorError):
        attempt.end()


def _restart(context: "RunContext", start: RunStart, error: Exception) -> RunStart:
    """Put the run folder back to the newest checkpoint; returns where the next attempt starts."""
    start = plan_restart(start)
    context.view.message(f"{' '.join(str(error).split())[:300]}. Going on from step {start.step}.")
    prepare_folder(start, context.settings)
    context.metrics.skip_known()
    return start


def _end_failed(inspected: Inspected, progress: _Progress, view: LiveView, error: BaseException) -> None:
    """Leave a report, or no folder, after an error, which the caller raises on: nothing here may take its place."""
    folder = inspected.start.folder
    how = "The run was stopped at once" if isinstance(error, KeyboardInterrupt) else "The run failed"
    if progress.has_trained:
        try:
            report = write_report(folder, inspected.model)
            view.message(f"{how}. Run folder: {folder}. Report: {report}.")
        except Exception as failure:  # whatever it is, what ended the run is what the caller must see
            view.message(f"{how}, and its report could not be written: {failure}")
    elif progress.has_made_folder:
        shutil.rmtree(folder, ignore_errors=True)
