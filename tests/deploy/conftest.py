"""One real cluster for the tests of this room."""

import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# Ray reads these when it is first imported, by whichever test that is, long before a cluster starts: so the token is
# made here, and given to the cluster. Without the last one a driver looks for a cluster on loopback elsewhere.
_folder = tempfile.TemporaryDirectory(prefix="sluice-test-token")
RAY_TOKEN = Path(_folder.name) / "ray_token"
RAY_TOKEN.touch(mode=0o600)
RAY_TOKEN.write_text(secrets.token_hex(32), encoding="ascii")
os.environ["RAY_AUTH_MODE"] = "token"
os.environ["RAY_AUTH_TOKEN_PATH"] = str(RAY_TOKEN)
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"

from tests.deploy.running_cluster import RunningCluster  # noqa: E402  # nothing may import ray before that


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """Yield a cluster that runs, in a home and on ports of its own; everything of it is ended afterwards."""
    running = RunningCluster(tmp_path_factory.mktemp("cluster"))
    running.home.mkdir(mode=0o700)
    (running.home / "ray_token").touch(mode=0o600)
    (running.home / "ray_token").write_bytes(RAY_TOKEN.read_bytes())
    try:
        started = running.start()
        assert started.returncode == 0, started.stderr
        yield running
    finally:
        running.stop()
        _folder.cleanup()
