"""What all attempts of a run have in common: each attempt is one start of its coordinator and ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable
    from pathlib import Path

    from learner.checkpoint.copies.copier import CheckpointCopier
    from learner.disk.metrics_lines import MetricsReader
    from learner.live.view import LiveView
    from learner.plan.memory import Sizes
    from protocol.node.home import ClusterState
    from protocol.settings.settings import Settings


@dataclass
class Changed:
    """What an operator changed of the run while it went on."""

    num_servers: int | None = None  # rollout servers; None: as the settings say


@dataclass(frozen=True)
class RunContext:
    """Settings, cluster and what shows the run."""

    settings: Settings  # as they were given
    model: Path  # local folder
    vocab_size: int | None  # of the model; None when it does not tell
    cluster: ClusterState  # addresses and files of this node's cluster
    sizes: Sizes  # of the run's models, for the plan of each attempt
    view: LiveView  # panel or log lines that the user sees
    stop: threading.Event  # set by the first Ctrl-C, SIGTERM or SIGHUP
    metrics: MetricsReader  # gives the new lines of metrics.jsonl
    record: Callable[[dict[str, float]], None]  # takes each new line of metrics.jsonl
    changed: Changed = field(default_factory=Changed)  # kept over attempts, not over commands
    copies: CheckpointCopier | None = None  # brings checkpoints elsewhere; None: they stay here
