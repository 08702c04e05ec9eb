"""The keeper with real small services: an ended one comes back as it was, and one that cannot live is told."""

import logging
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from deploy.node.home import Home
from deploy.node.keeper import Keeper
from deploy.node.processes import end, family, find
from deploy.node.service import is_healthy
from protocol.node.home import cluster_path, read_cluster
from tests.deploy.node.services import ANSWERING, ENDING, started, text_of, write_state
from tests.fakes.waiting import wait_until


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    monkeypatch.setenv("SLUICE_HOME", str(tmp_path))
    yield Home(tmp_path)
    if cluster_path().exists():
        end(family(process for record in read_cluster().processes if (process := find(record))))


@pytest.fixture
def keepers() -> Iterator[list[Keeper]]:
    """Yield a list for the keepers that a test makes: they watch nothing any more afterwards."""
    made: list[Keeper] = []
    yield made
    for keeper in made:
        keeper.forget(["retriever", "reward"])
    for handler in logging.getLogger("keeper").handlers:
        handler.close()


def pid_of(name: str) -> int:
    return {record.name: record.pid for record in read_cluster().processes}[name]


def is_answering(keeper: Keeper, name: str) -> bool:
    return {info["name"]: info for info in keeper.describe()}[name]["trouble"] == ""


def test_killed_service_is_started_again_with_its_command_environment_and_folder(
    home: Home, keepers: list[Keeper]
) -> None:
    reward = started(home, "reward", ANSWERING, OWN="value")
    write_state(home, reward)
    keepers.append(keeper := Keeper(str(home.root)))
    wait_until(lambda: "listening" in text_of(home.logs / "reward.log"))
    os.kill(reward.pid, signal.SIGKILL)
    wait_until(lambda: pid_of("reward") != reward.pid and is_answering(keeper, "reward"))

    again = psutil.Process(pid_of("reward"))
    assert (tuple(again.cmdline()), again.environ()["OWN"]) == (reward.command, "value")
    assert again.cwd() == str(home.root)
    assert [(info["num_restarts"], info["pid"]) for info in keeper.describe()] == [(1, again.pid)]
    assert "listening" in text_of(home.logs / "reward.previous.log")
    assert "service restarted  name=reward" in text_of(home.logs / "keeper.log")


def test_service_that_ends_again_and_again_is_left_alone_for_longer_and_told_with_the_end_of_its_log(
    home: Home, keepers: list[Keeper]
) -> None:
    write_state(home, started(home, "retriever", ENDING))
    keepers.append(keeper := Keeper(str(home.root)))
    wait_until(lambda: "in a row" in keeper.describe()[0]["trouble"])
    (info,) = keeper.describe()
    assert info["trouble"].endswith("times in a row; the end of its log: no index here")
    assert 2 <= info["num_restarts"] <= 4


def test_other_service_is_watched_while_one_hangs(
    home: Home, keepers: list[Keeper], monkeypatch: pytest.MonkeyPatch
) -> None:
    retriever, reward = started(home, "retriever", ANSWERING), started(home, "reward", ANSWERING)
    write_state(home, retriever, reward)
    os.kill(retriever.pid, signal.SIGSTOP)
    monkeypatch.setattr("deploy.node.service._ASK_S", 3600.0)  # the question to it ends with the test
    keepers.append(Keeper(str(home.root)))
    os.kill(reward.pid, signal.SIGKILL)
    wait_until(lambda: pid_of("reward") != reward.pid)
    os.kill(retriever.pid, signal.SIGKILL)
    wait_until(lambda: pid_of("retriever") != retriever.pid)


def test_what_a_killed_script_had_started_is_ended_before_the_next_start(home: Home, keepers: list[Keeper]) -> None:
    """A script without exec: its server lives on as nobody's child, and has the port."""
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {ANSWERING!r}, sys.argv[1]])"
    retriever = started(home, "retriever", script)
    write_state(home, retriever)
    wait_until(lambda: "listening" in text_of(home.logs / "retriever.log"))
    (server,) = psutil.Process(retriever.pid).children()
    keepers.append(keeper := Keeper(str(home.root)))
    os.kill(retriever.pid, signal.SIGKILL)
    wait_until(lambda: pid_of("retriever") != retriever.pid and is_answering(keeper, "retriever"))
    assert not server.is_running()
    assert keeper.describe()[0]["num_restarts"] == 1


def test_service_that_was_well_and_answers_no_more_is_started_again(home: Home, keepers: list[Keeper]) -> None:
    reward = started(home, "reward", ANSWERING)
    write_state(home, reward)
    wait_until(lambda: is_healthy(reward, home.token_file))
    keepers.append(keeper := Keeper(str(home.root), silent_s=0.1))
    asked = text_of(home.logs / "reward.log").count("GET")
    wait_until(lambda: text_of(home.logs / "reward.log").count("GET") >= asked + 2)  # the keeper has seen it well
    os.kill(reward.pid, signal.SIGSTOP)
    wait_until(lambda: pid_of("reward") != reward.pid and is_answering(keeper, "reward"))
    assert "service does not answer and is ended  name=reward" in text_of(home.logs / "keeper.log")


def test_forgotten_service_stays_ended(home: Home, keepers: list[Keeper]) -> None:
    retriever, reward = started(home, "retriever", ANSWERING), started(home, "reward", ANSWERING)
    write_state(home, retriever, reward)
    keepers.append(keeper := Keeper(str(home.root)))
    keeper.forget(["retriever"])
    os.kill(retriever.pid, signal.SIGKILL)
    os.kill(reward.pid, signal.SIGKILL)
    wait_until(lambda: pid_of("reward") != reward.pid)
    before = pid_of("reward")
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: pid_of("reward") != before)  # it has looked again meanwhile
    assert pid_of("retriever") == retriever.pid
    assert [info["name"] for info in keeper.describe()] == ["reward"]


def test_keeper_leaves_rays_own_process_alone(home: Home, keepers: list[Keeper]) -> None:
    write_state(home, started(home, "ray", ENDING), started(home, "reward", ANSWERING))
    keepers.append(keeper := Keeper(str(home.root)))
    assert [info["name"] for info in keeper.describe()] == ["reward"]


def test_next_keeper_finds_what_the_one_before_had_started(home: Home, keepers: list[Keeper]) -> None:
    reward = started(home, "reward", ANSWERING)
    write_state(home, reward)
    keepers.append(first := Keeper(str(home.root)))
    os.kill(reward.pid, signal.SIGKILL)
    wait_until(lambda: pid_of("reward") != reward.pid)
    first.forget(["reward"])
    before = pid_of("reward")
    keepers.append(second := Keeper(str(home.root)))
    assert [info["pid"] for info in second.describe()] == [before]
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: pid_of("reward") != before)


def test_start_that_wrote_an_older_process_is_put_right(home: Home, keepers: list[Keeper]) -> None:
    reward = started(home, "reward", ANSWERING)
    write_state(home, reward)
    keepers.append(keeper := Keeper(str(home.root)))
    os.kill(reward.pid, signal.SIGKILL)
    wait_until(lambda: pid_of("reward") != reward.pid)
    now = pid_of("reward")
    write_state(home, reward)
    keeper.keep()
    assert pid_of("reward") == now


def test_service_outlives_the_process_that_started_it(home: Home) -> None:
    record = started(home, "reward", ANSWERING)
    write_state(home, record)
    assert record.pid not in {child.pid for child in psutil.Process().children(recursive=True)}


def test_keeper_says_whether_its_node_reaches_another(home: Home, keepers: list[Keeper]) -> None:
    home.logs.mkdir()
    keepers.append(keeper := Keeper(str(home.root)))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert keeper.reach("127.0.0.1", port) == ""
    assert keeper.reach("127.0.0.1", port) == "Connection refused"
