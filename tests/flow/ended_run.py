"""A run of the user's that has ended, and what it left."""

import subprocess
import time
from dataclasses import dataclass

from tests.flow.flow_cluster import FlowCluster
from tests.flow.user_run import Bring, Left


@dataclass(frozen=True)
class Ran:
    """A run that ended. started_at: of its command, Unix seconds."""

    command: "subprocess.CompletedProcess[str]"
    left: Left
    started_at: float


def run(cluster: FlowCluster, user: Bring, name: str, **settings: object) -> Ran:
    """Return a run of the user's with these settings, `__` for the dot in their names; it has ended well."""
    overrides = {key.replace("__", "."): value for key, value in settings.items()}
    started_at = time.time()
    command = cluster.run(*user.options(name, overrides))
    assert command.returncode == 0, command.stdout + command.stderr
    return Ran(command, user.left(name), started_at)


def assert_same_weights(ran: Ran) -> None:
    """At staleness 0 behaviour and learner logprobs of the same tokens differ by rounding alone."""
    differences = [line["logprob_difference_max"] for line in ran.left.metrics if line["step"] > 0]
    print(f"largest logprob difference in each step: {differences}")
    assert len(differences) == 3
    assert all(0 <= difference < 1e-3 for difference in differences)
