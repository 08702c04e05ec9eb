"""A head in the foreground waits for its second node, which joins by the head's file; SIGTERM ends it."""

import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from deploy.cluster.ray_processes import ray_processes
from deploy.node.home import Home
from tests.deploy.conftest import RAY_TOKEN
from tests.deploy.running_cluster import RunningCluster

pytestmark = pytest.mark.stack


def own_address() -> str | None:
    """Return an IPv4 address of this machine that is not loopback, for the head: 127.0.0.1 lets nobody join."""
    found = [
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family == socket.AF_INET and not address.address.startswith("127.")
    ]
    return found[0] if found else None


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[RunningCluster, RunningCluster]]:
    folders = tmp_path / "head", tmp_path / "other"
    for folder in folders:
        folder.mkdir()
    head, other = map(RunningCluster, folders)
    head.home.mkdir(mode=0o700)
    (head.home / "ray_token").touch(mode=0o600)
    (head.home / "ray_token").write_bytes(RAY_TOKEN.read_bytes())
    yield head, other
    for node in (other, head):
        node.stop()
        shutil.rmtree(Home(node.home).ray_folder, ignore_errors=True)


@pytest.mark.skipif(own_address() is None, reason="this machine has no address but loopback")
def test_head_waits_for_a_node_that_joins_by_its_file_and_ends_at_sigterm(
    nodes: tuple[RunningCluster, RunningCluster],
) -> None:
    head, other = nodes
    address = own_address()
    assert address is not None
    begun = head.popen(*start_of(head, "--node-ip", address, "--block", "--wait-nodes", "2", "--num-cpus", "1"))
    with begun as started:
        shown = read_until(started, "Other nodes join with: deploy/start_cluster.sh --join ")
        join_file = shown.rpartition("--join ")[2].split()[0]
        there = ("--node-ip", "127.0.0.2", "--resources", '{"v100": 2}', "--num-cpus", "1")
        joined = other.start("--join", join_file, *there)
        assert joined.returncode == 0, joined.stderr
        read_until(started, "All 2 nodes are ready: ")
        read_until(started, "Running until SIGTERM or Ctrl-C.")
        assert resources(head)["v100"] == 2.0
        assert resources(head)["CPU"] == 2.0
        assert_searched_from(other, head)
        assert started.poll() is None
        started.send_signal(signal.SIGTERM)
        assert started.wait(90.0) == 0
    assert not (head.home / "cluster.json").exists()
    assert not ray_processes(Home(head.home))
    assert ray_processes(Home(other.home))  # the other node's are its own to end


def assert_searched_from(asking: RunningCluster, node: RunningCluster) -> None:
    """Check that a node's retriever answers another node, at the address that servers are told, with their token."""
    url = node.state.shared_retriever_url
    assert url is not None
    assert "127.0.0.1" not in url
    headers = {"authorization": f"Bearer {Path(asking.state.token_file).read_text().strip()}"}
    with httpx.Client(trust_env=False) as http:
        assert http.post(url, json={"queries": ["Belarus"]}).status_code == 401
        found = http.post(url, json={"queries": ["Belarus"]}, headers=headers).json()
    assert [document["id"] for document in found["result"][0]] == ["a"]


def start_of(cluster: RunningCluster, *options: str) -> list[str]:
    ports = ["--ray-port", str(cluster.ray_port), "--retriever-port", str(cluster.retriever_port)]
    ports += ["--reward-port", str(cluster.reward_port), "--corpus-path", str(cluster.corpus)]
    return ["-u", "-m", "deploy.cluster", "start", *ports, *options]


def read_until(process: "subprocess.Popen[str]", text: str, limit_s: float = 120.0) -> str:
    """Return the first line with this text."""
    assert process.stdout is not None
    deadline = time.monotonic() + limit_s
    seen = []
    for line in process.stdout:
        seen.append(line)
        if text in line:
            return line
        assert time.monotonic() < deadline, seen
    raise AssertionError(f"ended without {text!r}: {seen}")


def resources(cluster: RunningCluster) -> dict[str, float]:
    import ray

    with cluster.connected():
        return dict(ray.cluster_resources())
