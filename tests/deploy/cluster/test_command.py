"""A real cluster on this machine: started, found healthy, mended, refused a port, stopped without a trace."""

import contextlib
import os
import signal
from pathlib import Path

import psutil
import pytest

from deploy.cluster.ray_processes import ray_processes
from deploy.node.home import Home
from deploy.node.service import is_healthy
from protocol.http.listen import bind
from tests.deploy.running_cluster import RunningCluster
from tests.fakes.process_facts import title_of
from tests.fakes.waiting import wait_until

pytestmark = pytest.mark.stack

# A retriever as users bring it: it has no GET /health.
OWN_RETRIEVER = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Retriever(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(b'{"result": []}')

HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Retriever).serve_forever()
"""


def is_well(cluster: RunningCluster, name: str) -> bool:
    record = next(record for record in cluster.state.processes if record.name == name)
    return is_healthy(record, cluster.home / "token")


def test_second_start_keeps_what_is_healthy(cluster: RunningCluster) -> None:
    before = cluster.pids
    again = cluster.start()
    assert again.returncode == 0, again.stderr
    assert cluster.pids == before
    assert "sluice run" in again.stdout


def test_status_shows_each_process_with_its_log(cluster: RunningCluster) -> None:
    shown = cluster.status()
    assert shown.returncode == 0, shown.stderr
    for record in cluster.state.processes:
        assert record.name in shown.stdout
        assert str(record.pid) in shown.stdout
        assert Path(record.log).exists()
    assert shown.stdout.count("healthy") == 3
    nodes = cluster.command("nodes")
    assert nodes.returncode == 0, nodes.stderr
    (row,) = [line for line in nodes.stdout.splitlines() if f"{cluster.state.node_ip} (head)" in line]
    assert "ready" in row
    assert nodes.stdout.splitlines()[-1].startswith("In all: nodes 1,")


def test_others_of_the_machine_cannot_reach_rays_sockets(cluster: RunningCluster) -> None:
    assert Home(cluster.home).ray_folder.stat().st_mode & 0o077 == 0


def test_service_that_is_killed_is_started_again_and_alone(cluster: RunningCluster) -> None:
    before = cluster.pids
    os.kill(before["retriever"], signal.SIGKILL)
    wait_until(lambda: cluster.pids["retriever"] != before["retriever"] and is_well(cluster, "retriever"))
    after = cluster.pids
    assert (after["ray"], after["reward"]) == (before["ray"], before["reward"])
    shown = cluster.status()
    assert (shown.returncode, "restarted once" in shown.stdout) == (0, True)


def test_service_that_was_started_again_is_as_it_was(cluster: RunningCluster) -> None:
    first = psutil.Process(cluster.pids["reward"])
    environment, folder = first.environ(), first.cwd()
    first.kill()
    wait_until(lambda: cluster.pids["reward"] != first.pid and is_well(cluster, "reward"))
    second = psutil.Process(cluster.pids["reward"])
    assert (second.environ(), second.cwd()) == (environment, folder)


def test_start_while_the_keeper_restarts_a_service_leaves_one_of_it(cluster: RunningCluster) -> None:
    os.kill(cluster.pids["retriever"], signal.SIGKILL)
    assert cluster.start().returncode == 0
    serving = [process for process in cluster.processes if "retriever.serve" in process.cmdline()]
    assert [process.pid for process in serving] == [cluster.pids["retriever"]]


def test_keeper_that_is_killed_is_started_again_and_keeps_what_the_first_kept(cluster: RunningCluster) -> None:
    before = cluster.pids
    (keeper,) = [process for process in cluster.processes if title_of(process).startswith("ray::Keeper")]
    keeper.kill()
    wait_until(lambda: cluster.status().returncode == 0, 60.0)
    assert cluster.pids == before
    os.kill(before["reward"], signal.SIGKILL)
    wait_until(lambda: cluster.pids["reward"] != before["reward"] and is_well(cluster, "reward"))


def test_start_after_the_raylet_was_killed_starts_everything(cluster: RunningCluster) -> None:
    before = cluster.pids
    for process in ray_processes(Home(cluster.home)):
        with contextlib.suppress(psutil.NoSuchProcess):  # workers end with their raylet
            if process.name() == "raylet":
                process.kill()
                psutil.wait_procs([process], timeout=30)
    started = cluster.command("start")
    assert started.returncode == 0, started.stderr
    assert started.stdout.count("healthy") == 3
    assert cluster.status().returncode == 0
    assert set(cluster.pids.values()).isdisjoint(before.values())


@pytest.mark.parametrize("flag", ["--ray-port", "--retriever-port", "--node-ip"])
def test_start_that_cannot_be_ends_nothing_of_what_runs(cluster: RunningCluster, flag: str) -> None:
    before = cluster.pids
    with bind("test", "127.0.0.1", 0) as stranger:
        stranger.listen()
        given = "203.0.113.7" if flag == "--node-ip" else str(stranger.getsockname()[1])
        refused = cluster.command("start", flag, given)
    assert refused.returncode == 1
    assert "is not an address of this machine" in refused.stderr or f"choose another port with {flag}" in refused.stderr
    assert cluster.pids == before
    assert cluster.status().returncode == 0


def test_own_retriever_takes_the_place_of_the_bundled_one(cluster: RunningCluster, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_RETRIEVER, encoding="utf-8")
    script = tmp_path / "own.sh"
    script.write_text(f'exec python3 {tmp_path}/own.py "$@"\n', encoding="utf-8")
    started = cluster.start("--retriever-script", str(script))
    assert started.returncode == 0, started.stderr
    assert cluster.start().returncode == 0
    assert str(script) in cluster.state.processes[1].command
    assert cluster.start("--defaults").returncode == 0
    assert str(script) not in cluster.state.processes[1].command


def test_second_cluster_of_other_ports_stops_at_a_taken_one(cluster: RunningCluster, tmp_path: Path) -> None:
    other = RunningCluster(tmp_path)
    with bind("test", "127.0.0.1", other.reward_port) as stranger:
        stranger.listen()
        refused = other.start()
    assert refused.returncode == 1
    assert refused.stderr.startswith(
        f"Port {other.reward_port} of 127.0.0.1, wanted by the reward server, is taken by process {os.getpid()} ("
    )
    assert refused.stderr.endswith("Stop that process, or choose another port with --reward-port.\n")
    assert ray_processes(Home(other.home)) == []
    assert not (other.home / "cluster.json").exists()
    assert other.leavings <= {"logs"}


def test_service_that_ends_at_its_start_leaves_nothing_running(cluster: RunningCluster, tmp_path: Path) -> None:
    other = RunningCluster(tmp_path)
    script = tmp_path / "broken.sh"
    script.write_text("echo no index here; exit 3\n", encoding="utf-8")
    failed = other.start("--retriever-script", str(script))
    assert failed.returncode == 1
    assert failed.stderr.startswith("The retriever ended at its start: no index here (log: ")
    assert ray_processes(Home(other.home)) == []
    bind("test", "127.0.0.1", other.reward_port).close()
    assert other.leavings <= {"logs"}
