"""The command that stays in the foreground: which signals it hears."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.cluster.command import exit_status
from deploy.cluster.foreground import collect_signals, run_start, stay
from deploy.node.home import exclusive, this_home
from deploy.node.processes import find
from protocol.errors import NeighbourError
from protocol.node.home import ProcessRecord, cluster_path, write_cluster
from tests.fakes.cluster_state import cluster_state

_HEARD = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@pytest.fixture(autouse=True)
def handlers_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SLUICE_HOME", str(tmp_path))
    before = {number: signal.getsignal(number) for number in _HEARD}
    for number in _HEARD:  # nohup and a shell's background jobs ignore some of them
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_signal_that_its_starter_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    received = collect_signals()
    for number in _HEARD:
        os.kill(os.getpid(), number)
    assert received == [signal.SIGINT, signal.SIGHUP]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_end_of_rays_process_is_told_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    write_ended_ray(started_at=1.0)
    assert exit_status(lambda: stay([])) == 1
    assert capsys.readouterr().err == "ray: its process ended; its logs are in r/logs\n"


def test_stop_of_another_terminal_ends_the_stay_without_an_error() -> None:
    write_ended_ray(started_at=1.0)
    with exclusive(this_home()):  # as a stop does from before Ray ends
        threading.Timer(1.75, cluster_path().unlink).start()
        stay([])


def test_start_that_fails_is_the_end_of_the_command_that_would_stay() -> None:
    run_start([sys.executable, "-c", ""], [])
    with pytest.raises(SystemExit) as ended:
        run_start([sys.executable, "-c", "raise SystemExit(2)"], [])
    assert ended.value.code == 2


def test_start_that_is_killed_is_told_in_one_sentence() -> None:
    with pytest.raises(NeighbourError, match=r"^start: its process was ended by SIGKILL$"):
        run_start([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], [])


def test_start_that_is_under_way_is_ended_by_a_signal(tmp_path: Path) -> None:
    received = collect_signals()
    begun, ended = tmp_path / "begun", tmp_path / "ended"
    text = f"trap 'touch {ended}; exit 1' TERM; touch {begun}; kill -TERM $PPID; while :; do sleep 0.05; done"
    run_start(["bash", "-c", text], received)
    assert received == [signal.SIGTERM]
    assert begun.exists()
    assert ended.exists()


def write_ended_ray(started_at: float) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    ray = ProcessRecord(name="ray", pid=ended.pid, started_at=started_at, url="10.0.0.1:6379", log="r/logs")
    assert find(ray) is None
    write_cluster(cluster_state(ray_address="10.0.0.1:6379", node_ip="10.0.0.1", processes=[ray]))
