"""The command that stays in the foreground: which signals it hears."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.cluster.command import exit_status
from deploy.cluster.foreground import again, begin, hear_the_end, stay
from deploy.cluster.options.start_options import read_start_options
from deploy.node.processes import find
from protocol.errors import NeighbourError
from protocol.node.home import ClusterState, ProcessRecord, write_cluster

_HEARD = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@pytest.fixture(autouse=True)
def handlers_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SLUICE_HOME", str(tmp_path))
    before = {number: signal.getsignal(number) for number in _HEARD}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_signal_that_its_starter_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    told = hear_the_end()
    for number in _HEARD:
        os.kill(os.getpid(), number)
    assert told == [signal.SIGINT, signal.SIGHUP]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_end_of_rays_process_is_told_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_ended_ray(tmp_path, started_at=1.0)
    assert exit_status(lambda: print(stay([], lambda _: False))) == 1
    assert capsys.readouterr().err == "ray: its process ended; its logs are in r/logs\n"


def test_start_is_to_be_repeated_where_the_cluster_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_ended_ray(tmp_path, started_at=1.0)
    asked: list[str] = []
    assert not stay([], lambda state: not asked.append(state.ray_address))
    assert asked == ["10.0.0.1:6379"]
    assert "what this one had is started again" in capsys.readouterr().out


@pytest.mark.parametrize("nodes", [("--wait-nodes", "3"), ("--wait-nodes=3",), ()])
def test_start_that_is_repeated_waits_for_no_node_that_has_left_since(nodes: tuple[str, ...]) -> None:
    options = read_start_options(again([*nodes, "--ray-port", "6400"]))
    assert (options.wait_nodes, options.ray_port) == (0, 6400)


@pytest.mark.parametrize("goes_on", [True, False])
def test_signal_that_comes_while_the_end_of_rays_process_is_looked_into_ends_the_stay(
    goes_on: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_ended_ray(tmp_path, started_at=1.0)
    told: list[signal.Signals] = []

    def look(_: ClusterState) -> bool:
        told.append(signal.SIGTERM)
        return goes_on

    assert stay(told, look)
    assert "started again" not in capsys.readouterr().out


def test_ray_that_ended_at_once_is_not_started_again_here(tmp_path: Path) -> None:
    write_ended_ray(tmp_path, started_at=time.time() - 5.0)
    with pytest.raises(NeighbourError, match="its process ended"):
        stay([], lambda _: True)


def test_start_that_fails_is_the_end_of_the_command_that_would_stay() -> None:
    begin([sys.executable, "-c", ""], [])
    with pytest.raises(SystemExit) as ended:
        begin([sys.executable, "-c", "raise SystemExit(2)"], [])
    assert ended.value.code == 2


def test_start_that_is_killed_is_told_in_one_sentence() -> None:
    with pytest.raises(NeighbourError, match=r"^start: its process was ended by SIGKILL$"):
        begin([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], [])


def test_start_that_is_under_way_is_ended_by_a_signal(tmp_path: Path) -> None:
    told = hear_the_end()
    begun, ended = tmp_path / "begun", tmp_path / "ended"
    text = f"trap 'touch {ended}; exit 1' TERM; touch {begun}; kill -TERM $PPID; while :; do sleep 0.05; done"
    begin(["bash", "-c", text], told)
    assert told == [signal.SIGTERM]
    assert begun.exists()
    assert ended.exists()


def write_ended_ray(tmp_path: Path, started_at: float) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    ray = ProcessRecord(name="ray", pid=ended.pid, started_at=started_at, url="10.0.0.1:6379", log="r/logs")
    assert find(ray) is None
    write_cluster(
        ClusterState(
            ray_address="10.0.0.1:6379",
            namespace="sluice",
            node_ip="10.0.0.1",
            retriever_url="http://127.0.0.1:8000/retrieve",
            reward_url=None,
            token_file=str(tmp_path / "token"),
            ray_token_file=str(tmp_path / "ray_token"),
            keys_dir=str(tmp_path / "keys"),
            processes=[ray],
        )
    )
