"""A node that joined the cluster: its services have a keeper of its own, and its stop leaves the head's part alone."""

import os
import shutil
import signal
from collections.abc import Iterator

import pytest

from deploy.node.home import Home
from deploy.node.service_health import is_healthy
from tests.deploy.node.services import wait_until
from tests.deploy.running_cluster import RunningCluster

pytestmark = pytest.mark.stack


@pytest.fixture
def joined(cluster: RunningCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """Yield a second node of the cluster, on this machine by another address of loopback."""
    node = RunningCluster(tmp_path_factory.mktemp("joined"))
    node.home.mkdir(mode=0o700)
    for name in ("token", "ray_token", "keys"):
        copy = shutil.copytree if name == "keys" else shutil.copy
        copy(cluster.home / name, node.home / name)
    try:
        started = node.start("--address", cluster.state.ray_address, "--node-ip", "127.0.0.2")
        assert started.returncode == 0, started.stderr
        yield node
    finally:
        node.stop()
        shutil.rmtree(Home(node.home).ray_folder, ignore_errors=True)


def test_joined_node_keeps_its_own_services_and_stops_alone(cluster: RunningCluster, joined: RunningCluster) -> None:
    at_head, before = cluster.state, joined.state
    os.kill(joined.pids["retriever"], signal.SIGKILL)
    retriever = before.processes[1]
    wait_until(
        lambda: (
            joined.pids["retriever"] != retriever.pid and is_healthy(joined.state.processes[1], joined.home / "token")
        ),
        10.0,
    )
    assert cluster.state == at_head
    bare = joined.command("start")
    assert (bare.returncode, joined.state.options) == (0, before.options), bare.stderr
    assert joined.stop().stdout == "Stopped.\n"
    assert (cluster.status().returncode, cluster.state) == (0, at_head)
