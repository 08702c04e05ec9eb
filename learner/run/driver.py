"""The driver of a run: it checks the cluster, makes attempts, and restarts from the newest checkpoint after a crash.

    crash of                                  next
    a process, while the run trains           another attempt, up to run.max_restarts without progress between them
    a process, during a resumed start         one more attempt
    a process, during a first start           the run fails: its settings may be wrong
    a user's function, twice in one way       the run fails: another attempt would repeat it
    the load of a checkpoint, by its digest   another attempt from the checkpoint before; a second time the run fails
    the cluster                               the run fails

Modules that import Ray are imported late: Ray reads its credentials when it is first imported.
"""

import contextlib
import os
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from learner.checkpoint.manifest import RefusedCheckpointError
from learner.cluster.cluster_loss import describe_cluster_loss
from learner.disk.run_folder import CHECKPOINTS, SETTINGS, MetricsReader
from learner.live.view import LiveView
from learner.plan.memory import Sizes, read_sizes
from learner.plan.needs import needs_rollouts
from learner.plan.shown import describe_crowded
from learner.plan.topology import plan_topology
from learner.report.facts import read_run
from learner.report.headline import make_headline
from learner.report.write import write_report
from learner.run.checks.preflight import CheckedRun, check_same_files
from learner.run.copied_start import copier_of
from learner.run.pages import MetricsPages
from learner.run.parts import describe_parts
from learner.run.refused_start import accept_start, undone_if_refused
from learner.run.start import RunStart, lock_folder, plan_restart, prepare_folder, set_refused_aside
from learner.run.terminal import say, stop_signals
from protocol.errors import NeighbourError, OperatorError
from protocol.node.current_run import using_cluster
from protocol.node.home import read_cluster
from protocol.node.identity import sluice_command
from protocol.settings.loader import load_saved_settings
from protocol.settings.run_spec import run_spec
from protocol.settings.settings import Settings

if TYPE_CHECKING:
    from learner.run.attempt import RunAttempt, RunContext

_LOST = "Interrupted at once: steps after the last checkpoint are lost. Give the same command again to resume."
_INTERRUPTED = 130  # exit status of a command that Ctrl-C ended


@dataclass
class _Progress:
    """How far this command has come."""

    has_made_folder: bool = False  # the run folder is new
    has_trained: bool = False  # an attempt was launched


def drive(checked: CheckedRun) -> int:
    """Run to the end; returns the exit status.

    Raises: OperatorError and NeighbourError, after everything was ended. A run that failed before it trained leaves no
    new folder; one that failed later has its report.
    """
    cluster = read_cluster()
    if (loss := describe_cluster_loss(cluster)) is not None:
        raise OperatorError(f"{loss}. Start the cluster with sluice start.")
    start, settings, progress = checked.start, checked.settings, _Progress()
    for part in describe_parts(settings, cluster):
        say(part)
    os.environ |= cluster.ray_environment()
    from learner.cluster import ray_door
    from learner.run.attempt import RunContext

    with (
        using_cluster(start.run_id, start.folder),
        ray_door.connect(cluster),
        stop_signals() as stop,  # after Ray, which takes SIGTERM for itself when it connects
        LiveView(settings.run.max_steps) as view,
        contextlib.closing(MetricsPages(settings, start, view, checked.model)) as pages,
    ):
        for notice in checked.notices:
            view.message(notice, "INFO")
        try:
            sizes, services = _check_cluster(settings, checked, view)
            metrics, copies = MetricsReader(start.folder / "metrics.jsonl"), copier_of(settings, start)
            shared = (cluster, view, stop, metrics, pages.record, copies)
            context = RunContext(settings, checked.model, sizes, services, *shared)
            is_new = not start.folder.exists()
            with lock_folder(start), undone_if_refused(start.folder):
                progress.has_made_folder = is_new  # under the lock: a failure removes no folder of another command
                prepare_folder(start, settings)
                if checked.train is not None:
                    checked.train.save(start.folder)
                pages.open()
                ended, last_step = _run_attempts(start, context, progress)
                ended += _finish_copies(context)
        except BaseException as error:
            _end_failed(checked, progress, view, error)
            if isinstance(error, KeyboardInterrupt) and progress.has_trained:
                raise KeyboardInterrupt(_LOST) from None
            raise
    report = write_report(start.folder, checked.model)
    is_stopped = stop.is_set() and last_step < max(1, settings.run.max_steps)
    again = " Give the same command again to resume." if is_stopped else ""
    for line in (f"{ended}{again}", f"Report: {report}", *pages.closing_lines, *describe_result(start.folder)):
        say(line)
    return _INTERRUPTED if is_stopped and stop.is_by_user else 0


def describe_result(folder: Path) -> list[str]:
    """Return the scores at the first and the last evaluation, the newest model, and what to do next."""
    scores = [row for row in make_headline(read_run(folder)).scores if row.before and row.after]
    lines = [f"Score, {row.name}: {row.before} -> {row.after}" for row in scores]
    model = folder / CHECKPOINTS / "latest" / "model"
    if not model.is_dir():
        return lines
    run = shlex.quote(str(folder))
    use = f"eval {run} SET"
    if load_saved_settings(folder / SETTINGS).objective == "reward_model":  # it writes no text
        use = f"serve-reward --scorer reward_model --model {shlex.quote(str(model))}"
    verbs = (f"audit {run}", use, f"report {run} OTHER_RUN")
    return [*lines, f"Model: {model}", "Next:", *(f"  {sluice_command()} {verb}" for verb in verbs)]


def _check_cluster(settings: Settings, checked: CheckedRun, view: LiveView) -> tuple[Sizes, dict[str, str]]:
    """Check that the running cluster can hold the run; starts and writes nothing.

    Returns the sizes of the run's models and digests of its services (`check_services`). Raises: the first problem.
    """
    from learner.cluster import fleet, ray_door

    sizes, services = read_sizes(settings, checked.model), dict[str, str]()
    if not checked.start.seen:  # the attempt of a resumed run waits for nodes that are away
        topology = plan_topology(settings, sizes, ray_door.nodes())
        if crowded := describe_crowded(topology):
            view.message(crowded)
    fleet.await_idle_fleet()
    if fleet.renew_fleet():
        view.message("The code has changed since the cluster was started: its processes with other code restart.")
    if needs_rollouts(settings):
        view.show_phase("asking reward services and retriever")
        row = checked.train.first_row(settings.data) if checked.train is not None else None
        services = fleet.check_services(run_spec(settings, checked.start.run_id, 0, "unset"), row)
    return sizes, services


def _run_attempts(start: RunStart, context: "RunContext", progress: _Progress) -> tuple[str, int]:
    """Return how the run ended and its last step, after as many attempts as the table of this file allows.

    Raises: the error of the last attempt. No process of the run is left then, and the servers stay warm.
    """
    from learner.run.attempt import RunAttempt, StoppedAtStart

    furthest, num_restarts, last_error, has_refused = -1, 0, "", False
    while True:
        attempt = RunAttempt(context, start)
        if context.copies is not None:
            context.copies.start()
        try:
            attempt.launch()
            progress.has_trained = True
            accept_start(start.folder)
            ended = attempt.watch()
        except StoppedAtStart:
            ended = "Stopped before the first step."
        except RefusedCheckpointError as error:
            if has_refused:  # two corrupt ones in a row are improbable: the models or the settings have changed
                _end_attempt(attempt)
                raise
            attempt.end()
            has_refused = True
            set_refused_aside(start, error)
            start = _restart(context, start, error)
            continue
        except NeighbourError as error:
            if (loss := describe_cluster_loss(context.cluster)) is not None:
                raise _cluster_ended(loss, start) from error
            num_restarts = 1 if attempt.step > furthest else num_restarts + 1
            furthest = max(furthest, attempt.step)
            is_repeated = bool(error.place) and str(error) == last_error
            last_error = str(error)
            if is_repeated or num_restarts > _max_restarts(context, start, progress):
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
        return ended, max(attempt.step, start.step)


def _max_restarts(context: "RunContext", start: RunStart, progress: _Progress) -> int:
    if progress.has_trained:
        return context.settings.run.max_restarts
    return min(1, context.settings.run.max_restarts) if start.checkpoint is not None else 0


def _restart(context: "RunContext", start: RunStart, error: Exception) -> RunStart:
    """Reset the run folder to the newest checkpoint; returns the start of the next attempt.

    Raises: SettingsError when files of the model were changed meanwhile.
    """
    start = plan_restart(start)
    check_same_files(context.model, start)
    context.view.message(f"{' '.join(str(error).split())[:300]}. Resuming from step {start.step}.")
    prepare_folder(start, context.settings)
    context.metrics.skip_known()
    return start


def _finish_copies(context: "RunContext") -> str:
    """Wait for the copy of the last checkpoint; returns a sentence when it is missing, else an empty string."""
    if context.copies is None:
        return ""
    context.view.show_phase("copying the last checkpoint")
    missing = context.copies.finish(context.stop.is_set, context.settings.run.drain_s)
    return f" {missing}" if missing else ""


def _cluster_ended(loss: str, start: RunStart) -> OperatorError:
    """Return the error of a run whose cluster is gone."""
    saved = plan_restart(start).step
    place = f"the checkpoint of step {saved}" if saved else "its start"
    return OperatorError(
        f"The cluster was stopped, or died, during the run: {loss}. Start it with sluice start, with the options that "
        f"it had, and give this command again: the run resumes from {place}."
    )


def _end_attempt(attempt: "RunAttempt") -> None:
    """End an attempt after an error, which the caller raises: an error here must not hide it."""
    if describe_cluster_loss(attempt.context.cluster) is not None:
        return  # each call would wait a minute for the lost cluster
    with contextlib.suppress(NeighbourError, OperatorError):
        attempt.detach_servers()
    with contextlib.suppress(NeighbourError, OperatorError):
        attempt.end()


def _end_failed(checked: CheckedRun, progress: _Progress, view: LiveView, error: BaseException) -> None:
    """Leave a report, or no folder, after an error, which the caller raises: an error here must not hide it."""
    folder = checked.start.folder
    how = "The run was stopped at once" if isinstance(error, KeyboardInterrupt) else "The run failed"
    if progress.has_trained:
        try:
            report = write_report(folder, checked.model)
            view.message(f"{how}. Run folder: {folder}. Report: {report}.", "ERROR")
        except Exception as failure:  # whatever it is, the caller must see the error that ended the run
            view.message(f"{how}, and its report could not be written: {failure}", "ERROR")
    elif progress.has_made_folder:
        shutil.rmtree(folder, ignore_errors=True)
