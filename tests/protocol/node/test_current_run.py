"""One run at a time on a cluster: the second hears the first one's name, and a killed one leaves no lock behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.errors import OperatorError
from protocol.node.current_run import CurrentRun, current_run, refusal, using_cluster
from protocol.node.identity import process_space
from tests.fakes.full_disk import WHY, full_disk
from tests.fakes.waiting import wait_until

_OTHER = """\
import sys, time
from pathlib import Path
from protocol.node.current_run import using_cluster
with using_cluster("first", Path("/runs/first")):
    print("locked", flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLUICE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def other() -> Iterator["subprocess.Popen[str]"]:
    """A second process that is a run on this cluster."""
    process = subprocess.Popen([sys.executable, "-c", _OTHER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process, process.stdout as output:
        assert output.readline() == "locked\n"
        yield process
        process.kill()


def named(run: CurrentRun | None) -> tuple[str, str, int] | None:
    """Return name, folder and process of a run."""
    return None if run is None else (run.run_id, run.folder, run.pid)


def use() -> None:
    with using_cluster("second", Path("/runs/second")):
        pass


def test_second_run_is_refused_with_the_name_of_the_first(other: "subprocess.Popen[str]") -> None:
    with pytest.raises(OperatorError) as caught:
        use()
    assert str(caught.value).startswith(
        f"The run first is using this cluster (process {other.pid}, folder /runs/first). Wait for its end"
    )


def test_run_that_was_killed_leaves_the_cluster_free(other: "subprocess.Popen[str]") -> None:
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert current_run() is None
    use()


def test_current_run_is_told_to_other_processes(other: "subprocess.Popen[str]") -> None:
    assert named(current_run()) == ("first", "/runs/first", other.pid)


def test_current_run_tells_since_when_and_where_its_output_is(home: Path) -> None:
    output = home / "output"
    began = time.time()
    with output.open("wb") as file, subprocess.Popen([sys.executable, "-c", _OTHER], stdout=file) as process:
        wait_until(lambda: output.stat().st_size > 0)
        run = current_run()
        process.kill()
    assert run is not None
    assert (run.log, began - 1.0 < run.started_at < time.time() + 1.0) == (str(output), True)


def test_run_of_an_older_command_tells_neither() -> None:
    older = CurrentRun.model_validate({"run_id": "a", "folder": "/a", "pid": 1})
    assert (older.started_at, older.log) == (0.0, "")


def test_no_run_is_current_before_the_first_and_after_the_last(home: Path) -> None:
    assert current_run() is None
    assert not (home / "run.lock").exists()
    with using_cluster("mine", Path("/runs/mine")):
        # Another open file of the same process does not have the lock either.
        assert named(current_run()) == ("mine", "/runs/mine", os.getpid())
    assert current_run() is None


def test_lock_can_be_read_by_its_owner_alone(home: Path) -> None:
    use()
    assert (home / "run.lock").stat().st_mode & 0o777 == 0o600


def test_run_that_comes_while_somebody_asks_is_not_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protocol.node.current_run._LOCK_WITHIN_S", 30.0)  # the reader may wait for a core
    use()
    asking = subprocess.Popen(
        [sys.executable, "-c", "import fcntl, sys, time; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_SH); "
         "print('asks', flush=True); time.sleep(0.3)", str(home / "run.lock")],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert asking.stdout is not None
    with asking, asking.stdout as output:
        output.readline()
        use()


def test_run_of_another_machine_has_no_process_here() -> None:
    mine = CurrentRun(run_id="mine", folder="/runs/mine", pid=os.getpid(), processes=process_space())
    far = mine.model_copy(update={"processes": "another-boot/4026531836", "machine": "gpu-box-2"})
    assert (mine.pid_here, far.pid_here) == (os.getpid(), None)
    assert f"(process {os.getpid()} of gpu-box-2, folder /runs/mine)" in refusal(far)
    assert "end it with sluice runs stop there, or" in refusal(far)


def test_full_disk_is_said_in_a_sentence(home: Path) -> None:
    said = f"run.lock cannot be written: {WHY}. Free the disk"
    with pytest.raises(OperatorError, match=said), full_disk(), using_cluster("first", Path("/runs/first")):
        pass
    assert current_run() is None


def test_home_that_is_closed_to_this_user_is_named(home: Path) -> None:
    home.chmod(0)
    user = os.geteuid()
    os.seteuid(65534 if user == 0 else user)  # root reads what is closed to everybody
    try:
        with pytest.raises(OperatorError) as caught:
            current_run()
    finally:
        os.seteuid(user)
        home.chmod(0o700)
    assert str(caught.value) == (
        f"{home}/run.lock cannot be opened (Permission denied). Set SLUICE_HOME to a folder of your own."
    )
