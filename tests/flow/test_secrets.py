"""A cluster's keys and tokens while a run trains and after it: in their own files, and nowhere else."""

from pathlib import Path

import pytest

from deploy.node.home import Home
from tests.flow.flow_cluster import FlowCluster
from tests.flow.user_run import Bring

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

_SECRETS = ("token", "ray_token", "keys/coordinator.sec", "keys/peer.sec")


@pytest.fixture(scope="module")
def argument_lists(cluster: FlowCluster, user: Bring) -> list[bytes]:
    """Return the argument list of every process of this machine while a run trained, which has ended by now."""
    with cluster.running(*user.options("secrets", {"run.max_steps": 2})) as run:
        run.wait_until(lambda: user.left("secrets").last_step >= 1)
        found = [_read(path) for path in Path("/proc").glob("[0-9]*/cmdline")]
        ended = run.finished()
    assert ended.returncode == 0, ended.stderr
    return found


@pytest.mark.parametrize("name", _SECRETS)
def test_secret_is_in_no_argument_list(cluster: FlowCluster, argument_lists: list[bytes], name: str) -> None:
    secret = _secret(cluster, name)
    assert len(argument_lists) > 5
    assert [line for line in argument_lists if secret in line] == []


@pytest.mark.parametrize("name", _SECRETS)
def test_secret_is_in_no_file_but_its_own(
    cluster: FlowCluster, user: Bring, argument_lists: list[bytes], name: str
) -> None:
    secret = _secret(cluster, name)
    folders = (cluster.home, user.folder / "runs" / "secrets", Home(cluster.home).ray_folder)
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    names = {path.name for path in files}
    assert {"settings.yaml", "ledger.sqlite", "MANIFEST.json", "retriever.log"} <= names  # what a run leaves is there
    assert [path for path in files if secret in _read(path)] == [cluster.home / name]


@pytest.mark.parametrize("name", _SECRETS)
def test_secret_is_its_owners_alone(cluster: FlowCluster, name: str) -> None:
    path = cluster.home / name
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def _secret(cluster: FlowCluster, name: str) -> bytes:
    secret = (cluster.home / name).read_bytes().strip()
    assert len(secret) >= 16
    return secret


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # a process or file that has gone, or is another user's
        return b""
