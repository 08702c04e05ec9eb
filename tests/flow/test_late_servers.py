"""A run that goes on while one of its rollout servers is still loading its model."""

import re
import signal
import subprocess

import pytest

from learner import audit
from tests.flow.flow_cluster import FlowCluster
from tests.flow.user_run import Bring, Left, each_trained_once

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

_OPTIONS = {"run.max_steps": 2, "learner.checkpoint_every_steps": 2, "learner.lr_schedule": "constant"}
_TRAINED = "SELECT COUNT(*) FROM trajectories WHERE step IS NOT NULL AND server = 'sluice-rollout-1'"


@pytest.fixture(scope="module")
def gone_on(cluster: FlowCluster, slow_user: Bring) -> "tuple[Left, subprocess.CompletedProcess[str]]":
    """Return what is left of a run that had one rollout server, and went on with two."""
    left = slow_user.left("late")
    begun = cluster.run(*slow_user.options("late", _OPTIONS))
    assert begun.returncode == 0, begun.stderr
    two = {**_OPTIONS, "run.max_steps": 1000, "rollout.num_servers": 2}
    with cluster.running(*slow_user.options("late", two)) as run:
        run.wait_until(lambda: left.rows(_TRAINED) != [(0,)])
        run.process.send_signal(signal.SIGTERM)
        return left, run.finished()


def test_run_that_goes_on_trains_before_all_of_its_servers_are_ready(
    gone_on: "tuple[Left, subprocess.CompletedProcess[str]]",
) -> None:
    left, command = gone_on

    assert command.returncode == 0, command.stdout + command.stderr
    told = re.sub(r"\s+", " ", command.stdout)
    late, serves = "sluice-rollout-1 is still starting: ", "sluice-rollout-1 serves, from"
    assert f"{late}the run continues with the other rollout servers." in told
    assert 0 < told.index(late) < told.index(" step=3 ") < told.index(serves)
    assert left.trained == each_trained_once(left.last_step)
    assert audit.main([str(left.folder)]) == 0


def test_server_that_came_late_stays_warm(
    gone_on: "tuple[Left, subprocess.CompletedProcess[str]]", cluster: FlowCluster
) -> None:
    assert len(cluster.actors("RolloutServer")) == 2
