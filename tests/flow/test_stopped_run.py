"""A run in the background: who can reach it, where its secrets are, what it leaves, and how it resumes."""

import ipaddress
import re
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from deploy.node.home import Home
from learner import audit
from tests.fakes.waiting import wait_until
from tests.flow.flow_cluster import FlowCluster, expect_no_leavings
from tests.flow.user_run import Bring, Left, each_trained_once

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

_OPTIONS = {"run.max_steps": 5000, "learner.checkpoint_every_steps": 0}
_TRAINED = "SELECT COUNT(*) FROM trajectories WHERE step IS NOT NULL AND server = '{}'"
_SECRETS = ("token", "ray_token", "keys/coordinator.sec", "keys/peer.sec")


@dataclass(frozen=True)
class Stopped:
    """A run that was looked at while it trained, and then stopped."""

    left: Left
    listed: str  # by `sluice runs`, while it trained
    stopped: "subprocess.CompletedProcess[str]"  # `sluice runs stop`
    output: str
    listening: set[tuple[str, str, int]]  # (process, address, port) of every socket of the cluster and the command
    jobs_answers: list[httpx.Response | None]  # of each of these ports to a request for Ray's jobs
    arguments: list[bytes]  # argument list of every process of this machine


@pytest.fixture(scope="module")
def stopped(cluster: FlowCluster, slow_user: Bring) -> Stopped:
    left = slow_user.left("stopped")
    begun = cluster.run(*slow_user.options("stopped", _OPTIONS), "--no-wait")
    assert begun.returncode == 0, begun.stderr
    (pid,) = re.findall(r"The run stopped continues in the background \(process (\d+)\)", begun.stdout)
    wait_until(lambda: left.last_step >= 2, 500.0)
    processes = [psutil.Process(int(pid)), *cluster.processes()]
    listening = {socket for process in processes for socket in _listening(process)}
    arguments = [_read(path) for path in Path("/proc").glob("[0-9]*/cmdline")]
    # All at once: most of them speak no HTTP and are silent until the time-out.
    with ThreadPoolExecutor(max_workers=32) as threads:
        answers = list(threads.map(_jobs_at, {port for _, _, port in listening}))
    second = cluster.run(*slow_user.options("second"))
    assert (second.returncode, second.stderr.split(" (")[0]) == (1, "The run stopped is using this cluster")
    listed = cluster.runs().stdout
    ended = cluster.runs("stop")
    return Stopped(left, listed, ended, cluster.runs("logs", "stopped").stdout, listening, answers, arguments)


# -- who can reach it -------------------------------------------------------------------------------------------------


def test_everything_that_listens_is_on_loopback(stopped: Stopped) -> None:
    assert [socket for socket in sorted(stopped.listening) if not _is_loopback(socket[1])] == []
    names = ("gcs_server", "raylet", "retriever.serve", "rewards.serve", "CoordinatorProcess", "StandbyProcess")
    for name in names:
        assert [process for process, _, _ in stopped.listening if name in process], name


def test_rays_job_interface_refuses_a_request_without_a_token(stopped: Stopped) -> None:
    answers = [answer for answer in stopped.jobs_answers if answer is not None]
    assert 401 in {answer.status_code for answer in answers}
    # What else answers HTTP without a token are Prometheus metrics.
    let_in = [answer.text for answer in answers if answer.is_success]
    assert [text[:80] for text in let_in if not text.startswith("# HELP")] == []


# -- its secrets ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", _SECRETS)
def test_secret_is_in_no_argument_list_and_in_no_file_but_its_own(
    cluster: FlowCluster, stopped: Stopped, name: str
) -> None:
    path = cluster.home / name
    secret = path.read_bytes().strip()
    assert len(secret) >= 16
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert len(stopped.arguments) > 5
    assert [line for line in stopped.arguments if secret in line] == []
    folders = (cluster.home, stopped.left.folder, Home(cluster.home).ray_folder)
    files = [file for folder in folders for file in folder.rglob("*") if file.is_file() and not file.is_symlink()]
    names = {file.name for file in files}
    assert {"settings.yaml", "ledger.sqlite", "MANIFEST.json", "retriever.log"} <= names  # what a run leaves is there
    assert [file for file in files if secret in _read(file)] == [path]


# -- what it leaves ---------------------------------------------------------------------------------------------------


def test_a_run_in_the_background_is_listed_and_stopped_and_its_output_kept(stopped: Stopped) -> None:
    assert re.search(r"stopped +│ running \(process \d+\) .* \d+ of 5000 ", stopped.listed)
    assert (stopped.stopped.stdout, stopped.stopped.stderr) == ("stopped has ended.\n", "")
    assert "stopped by the user" in stopped.output
    assert "report.html" in stopped.output


def test_a_stopped_run_leaves_a_checkpoint_of_its_last_step_and_a_report(stopped: Stopped) -> None:
    assert stopped.left.newest_checkpoint == stopped.left.last_step >= 2
    assert "</html>" in (stopped.left.folder / "report.html").read_text(encoding="utf-8")
    assert audit.main([str(stopped.left.folder)]) == 0


def test_nothing_of_a_stopped_run_is_left_running(stopped: Stopped, cluster: FlowCluster) -> None:
    expect_no_leavings(cluster)
    assert len(cluster.actors("RolloutServer")) == 1


def test_groups_in_flight_when_the_run_was_stopped_are_not_trained(stopped: Stopped) -> None:
    assert stopped.left.trained == each_trained_once(stopped.left.last_step)
    begun = {step for (step,) in stopped.left.rows("SELECT step FROM prompts WHERE state = 'assigned'")}
    assert begun <= {stopped.left.last_step + 1}  # a part of the next step may have begun: it is taken again


# -- it resumes with one more server ----------------------------------------------------------------------------------


def test_a_resumed_run_trains_before_all_of_its_servers_are_ready_and_ends_well_at_sigterm(
    stopped: Stopped, cluster: FlowCluster, slow_user: Bring
) -> None:
    left, step, num_warm = stopped.left, stopped.left.last_step, len(cluster.actors("RolloutServer"))
    late = f"sluice-rollout-{num_warm}"  # warm servers come first
    with cluster.running(*slow_user.options("stopped", {**_OPTIONS, "rollout.num_servers": num_warm + 1})) as run:
        run.wait_until(lambda: left.rows(_TRAINED.format(late)) != [(0,)])
        run.process.send_signal(signal.SIGTERM)
        command = run.finished()
    assert command.returncode == 0, command.stdout + command.stderr
    told = re.sub(r"\s+", " ", command.stdout)
    said = [f"{late} is still starting: the run continues with the other", f" step={step + 1} ", f"{late} serves, from"]
    assert [text for text in said if text not in told] == []
    assert said == sorted(said, key=told.index)
    assert "stopped by the user" in told
    assert left.trained == each_trained_once(left.last_step)
    assert left.newest_checkpoint == left.last_step
    assert audit.main([str(left.folder)]) == 0
    assert len(cluster.actors("RolloutServer")) == num_warm + 1  # the late one stays warm


def _jobs_at(port: int) -> httpx.Response | None:
    """Return the port's answer to a request for Ray's jobs; None when it speaks no HTTP."""
    try:
        return httpx.get(f"http://127.0.0.1:{port}/api/jobs/", timeout=5.0)
    except httpx.HTTPError:
        return None


def _is_loopback(address: str) -> bool:
    """Return whether an address is of this machine alone; an IPv6 socket shows an IPv4 one as ::ffff:127.0.0.1."""
    parsed = ipaddress.ip_address(address)
    return ((isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped) or parsed).is_loopback


def _listening(process: psutil.Process) -> list[tuple[str, str, int]]:
    """Return the TCP sockets of a process that listen, and its UDP sockets that are bound."""
    try:
        name = " ".join(process.cmdline())[:300]
        return [
            (name, connection.laddr.ip, connection.laddr.port)
            for connection in process.net_connections(kind="inet")
            if connection.status == psutil.CONN_LISTEN or (connection.status == psutil.CONN_NONE and connection.laddr)
        ]
    except psutil.NoSuchProcess:
        return []


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # a process or file that has gone, or is another user's
        return b""
