"""`deploy.cluster servers RUN +N`: the wish, and what the run says of it."""

import fcntl
import threading
import time
from pathlib import Path

import pytest

from deploy.cluster.servers import change_servers
from protocol.errors import OperatorError
from protocol.node.current_run import using_cluster
from protocol.node.scale_request import ScaleReply, read_request, write_reply
from tests.fakes.waiting import wait_until


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLUICE_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def answering(folder: Path, *, is_refused: bool) -> threading.Thread:
    """Answer the next wish as a run would: that it is at it, then what came of it."""

    def answer() -> None:
        wait_until(lambda: read_request(folder) is not None)
        wish = read_request(folder)
        assert wish is not None
        assert wish.change == 2
        write_reply(folder, ScaleReply(id=wish.id, text="They start.", is_last=False))
        write_reply(folder, ScaleReply(id=wish.id, text="3 in all.", is_last=True, is_refused=is_refused))

    thread = threading.Thread(target=answer)
    thread.start()
    return thread


def test_command_says_what_the_run_says(tmp_path: Path) -> None:
    with using_cluster("my-run", tmp_path):
        run = answering(tmp_path, is_refused=False)
        assert change_servers(["my-run", "+2"]) == "3 in all."
        run.join()


def test_command_goes_on_waiting_for_a_run_that_has_said_that_it_is_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with using_cluster("my-run", tmp_path):
        thread = threading.Thread(target=lambda: said.append(change_servers(["my-run", "+2"], reply_s=1.0)))
        said: list[str] = []
        thread.start()
        wait_until(lambda: read_request(tmp_path) is not None)
        wish = read_request(tmp_path)
        assert wish is not None
        write_reply(tmp_path, ScaleReply(id=wish.id, text="It is next.", is_last=False))
        time.sleep(0.6)
        write_reply(tmp_path, ScaleReply(id="another", text="That one is next.", is_last=False))
        time.sleep(1.0)  # longer than a run that says nothing is waited for
        write_reply(tmp_path, ScaleReply(id=wish.id, text="3 in all.", is_last=True))
        thread.join()
    assert said == ["3 in all."]
    assert capsys.readouterr().out == "It is next.\n"


def test_commands_that_come_at_once_are_all_heard(tmp_path: Path) -> None:
    said: list[str] = []
    with using_cluster("my-run", tmp_path):
        asked = [
            threading.Thread(target=lambda change=change: said.append(change_servers(["my-run", change])))
            for change in ("+1", "+2", "+3")
        ]
        for thread in asked:
            thread.start()
        heard: dict[str, int] = {}
        while len(heard) < 3:
            wait_until(lambda: (wish := read_request(tmp_path)) is not None and wish.id not in heard)
            wish = read_request(tmp_path)
            assert wish is not None
            time.sleep(0.3)  # for the others' to come in its place
            heard[wish.id] = wish.change
            write_reply(tmp_path, ScaleReply(id=wish.id, text=f"{wish.change} more.", is_last=True))
        for thread in asked:
            thread.join()
    assert sorted(heard.values()) == [1, 2, 3]
    assert sorted(said) == ["1 more.", "2 more.", "3 more."]


def test_command_whose_run_ended_before_its_turn_came_leaves_no_wish_to_the_next_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []

    def ask() -> None:
        try:
            change_servers(["my-run", "+1"])
        except OperatorError as error:
            said.append(str(error))

    with (tmp_path / "servers.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with using_cluster("my-run", tmp_path):
            command = threading.Thread(target=ask)
            command.start()
            wait_until(lambda: "this one is next" in capsys.readouterr().out)
    command.join()
    assert said == ["servers: the run my-run has ended."]
    assert read_request(tmp_path) is None


def test_command_fails_where_the_run_refuses(tmp_path: Path) -> None:
    with using_cluster("my-run", tmp_path):
        run = answering(tmp_path, is_refused=True)
        with pytest.raises(OperatorError, match=r"^servers: 3 in all\.$"):
            change_servers(["my-run", "+2"])
        run.join()


def test_run_that_does_not_take_it_up_is_named(tmp_path: Path) -> None:
    with using_cluster("my-run", tmp_path), pytest.raises(OperatorError, match="the run my-run does not answer"):
        change_servers(["my-run", "-1"], reply_s=0.1)


@pytest.mark.parametrize("arguments", [[], ["my-run"], ["my-run", "2"], ["my-run", "+two"], ["my-run", "+1", "more"]])
def test_wrong_arguments_are_refused(arguments: list[str]) -> None:
    with pytest.raises(OperatorError, match="give the run's name and how many more or fewer"):
        change_servers(arguments)


def test_run_that_is_not_here_is_refused_with_the_one_that_is(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match="no run of this machine uses this cluster"):
        change_servers(["other", "+1"])
    with using_cluster("my-run", tmp_path), pytest.raises(OperatorError, match="my-run uses this cluster"):
        change_servers(["other", "+1"])
