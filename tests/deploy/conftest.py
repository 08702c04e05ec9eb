"""One real cluster for the tests of this room."""

import os
from collections.abc import Iterator

import pytest

# Ray reads this when it is first imported: without it, a driver looks for a cluster on loopback elsewhere.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"

from tests.deploy.running_cluster import RunningCluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """Yield a cluster that runs, in a home and on ports of its own; everything of it is ended afterwards."""
    running = RunningCluster(tmp_path_factory.mktemp("cluster"))
    try:
        started = running.start()
        assert started.returncode == 0, started.stderr
        yield running
    finally:
        running.stop()
