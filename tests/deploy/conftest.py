"""One real cluster for the tests of this room."""

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

# Ray reads these when it is first imported, by whichever test that is, long before a cluster starts: so the token is
# made here, and given to the cluster. Without the last one a driver looks for a cluster on loopback elsewhere.
_CHECKOUT = Path(__file__).parents[2]
_folder = tempfile.TemporaryDirectory(prefix="sluice-test-token")
RAY_TOKEN = Path(_folder.name) / "ray_token"
RAY_TOKEN.touch(mode=0o600)
RAY_TOKEN.write_text(secrets.token_hex(32), encoding="ascii")
os.environ["RAY_AUTH_MODE"] = "token"
os.environ["RAY_AUTH_TOKEN_PATH"] = str(RAY_TOKEN)
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"

from deploy.node.home import Home  # noqa: E402
from tests.deploy.running_cluster import RunningCluster  # noqa: E402  # nothing may import ray before that


@contextmanager
def started(cluster: RunningCluster) -> Iterator[RunningCluster]:
    """Start a cluster with the token that this process has; everything of it is ended afterwards."""
    cluster.home.mkdir(mode=0o700)
    (cluster.home / "ray_token").touch(mode=0o600)
    (cluster.home / "ray_token").write_bytes(RAY_TOKEN.read_bytes())
    try:
        begun = cluster.start()
        assert begun.returncode == 0, begun.stderr
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(Home(cluster.home).ray_folder, ignore_errors=True)  # logs, which a stop leaves to be read


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """Yield a cluster that runs, in a home and on ports of its own."""
    with started(RunningCluster(tmp_path_factory.mktemp("cluster"))) as running:
        yield running
    _folder.cleanup()


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the code, which a test may change."""
    folder = tmp_path_factory.mktemp("checkout")
    for room in ("protocol", "rollout", "learner", "rewards", "retriever", "deploy"):
        shutil.copytree(_CHECKOUT / room, folder / room, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / ".venv").symlink_to(_CHECKOUT / ".venv")
    return folder


@pytest.fixture(scope="module")
def changeable(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """Yield a cluster that runs the code in `checkout`."""
    with started(RunningCluster(tmp_path_factory.mktemp("changeable"), checkout)) as running:
        yield running
