"""Everything that all attempts of a run share, made once the running cluster was checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from learner.cluster import fleet, ray_door
from learner.disk.model_folder import read_vocab_size
from learner.disk.run_folder import MetricsReader
from learner.plan.memory import Sizes, read_sizes
from learner.plan.needs import needs_of
from learner.plan.topology import plan_topology
from learner.run.copied_start import copier_of
from protocol.settings.run_spec import run_spec

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable
    from pathlib import Path

    from learner.checkpoint.copier import CheckpointCopier
    from learner.live.view import LiveView
    from learner.run.checks.preflight import CheckedRun
    from protocol.node.home import ClusterState
    from protocol.settings.settings import Settings


@dataclass
class RunContext:
    """Settings, cluster and display of a run; only `num_servers` changes."""

    settings: Settings  # settings as given
    model: Path  # local folder of the policy
    vocab_size: int | None  # tokens of the model; None: unknown
    cluster: ClusterState  # addresses and files of this node's cluster
    sizes: Sizes  # sizes of the run's models, for the plan of each attempt
    view: LiveView  # panel or log lines that the user sees
    stop: threading.Event  # set by the first Ctrl-C, SIGTERM or SIGHUP
    metrics: MetricsReader  # source of the new lines of metrics.jsonl
    record: Callable[[dict[str, float]], None]  # consumer of each new line of metrics.jsonl
    copies: CheckpointCopier | None  # copier of checkpoints; None: they are not copied
    num_servers: int  # rollout servers of the next attempt; an operator may change it


def make_context(
    checked: CheckedRun,
    cluster: ClusterState,
    view: LiveView,
    stop: threading.Event,
    record: Callable[[dict[str, float]], None],
) -> RunContext:
    """Check the running cluster and return the run's context; starts and writes nothing.

    Raises: the first problem of the cluster.
    """
    settings = checked.settings
    sizes = read_sizes(settings, checked.model)
    if not checked.start.seen:  # the attempt of a resumed run waits for nodes that are away
        with ray_door.naming_drained():
            plan_topology(settings, sizes, ray_door.nodes())
    fleet.await_idle_fleet()
    if fleet.renew_fleet():
        view.message("The code has changed since the cluster was started: its processes with other code restart.")
    if needs_of(settings).rollouts:
        view.show_phase("asking reward services and retriever")
        fleet.check_services(run_spec(settings, checked.start.run_id, 0, "unset"))
    return RunContext(
        settings=settings,
        model=checked.model,
        vocab_size=read_vocab_size(checked.model),
        cluster=cluster,
        sizes=sizes,
        view=view,
        stop=stop,
        metrics=MetricsReader(checked.start.folder / "metrics.jsonl"),
        record=record,
        copies=copier_of(settings, checked.start),
        num_servers=settings.rollout.num_servers,
    )
