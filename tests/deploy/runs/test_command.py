"""`sluice runs`: which run uses this node's cluster, its output, its end."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.runs.command import last_word, main, step_of
from protocol.node.current_run import log_of_run
from tests.fakes.waiting import wait_until

# The command of a run, as far as others see it: it has the cluster, writes, and ends at SIGTERM.
_RUN = """
import signal, sys
from pathlib import Path
from protocol.node.current_run import using_cluster
with using_cluster("my-run", Path(sys.argv[1])):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print("first line", "last line", sep="\\n", flush=True)
    Path(sys.argv[1], "ready").touch()
    signal.pause()
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLUICE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a run folder after three steps of sixty."""
    folder = tmp_path / "runs" / "my-run"
    folder.mkdir(parents=True)
    (folder / "settings.yaml").write_text("run: {max_steps: 60}\n")
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in (1, 2, 3)))
    return folder


@pytest.fixture
def run(home: Path, folder: Path) -> "Iterator[subprocess.Popen[bytes]]":
    """Yield a run's command in the background, which has the cluster."""
    log = log_of_run("my-run")
    log.parent.mkdir(parents=True)
    with log.open("wb") as output:
        command = subprocess.Popen([sys.executable, "-c", _RUN, str(folder)], stdout=output, env={**os.environ})
    with command:
        wait_until((folder / "ready").exists)
        yield command
        command.kill()


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Return the exit status and what was printed, on whichever stream."""
    status = main(arguments)
    printed = capsys.readouterr()
    return status, printed.out + printed.err


def test_list_says_what_runs_since_when_and_at_which_step(
    run: "subprocess.Popen[bytes]", folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, printed = told(capsys)
    assert status == 0
    (row,) = [line for line in printed.splitlines() if "my-run" in line and "│" in line]
    cells = [cell.strip() for cell in row.split("│")[1:-1]]
    assert [cells[0], cells[1], *cells[3:]] == ["my-run", f"running (process {run.pid})", "3 of 60", str(folder)]
    assert cells[2].startswith("20")
    (listed,) = json.loads(told(capsys, "--json")[1])
    assert (listed["name"], listed["is_running"], listed["pid"], listed["step"]) == ("my-run", True, run.pid, "3 of 60")
    assert json.loads(told(capsys, "list", "--json")[1]) == [listed]


def test_logs_prints_the_end_of_a_runs_output(
    run: "subprocess.Popen[bytes]", capsys: pytest.CaptureFixture[str]
) -> None:
    assert told(capsys, "logs") == (0, "first line\nlast line\n")
    assert told(capsys, "logs", "my-run") == (0, "first line\nlast line\n")


def test_logs_that_follow_have_what_is_written_while_the_end_is_shown(
    run: "subprocess.Popen[bytes]", capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write, written = sys.stdout.write, []

    def writes_meanwhile(text: str) -> int:
        if not written:
            written.append(text)
            with log_of_run("my-run").open("a") as log:
                log.write("between\n")
            run.terminate()
            run.wait(60.0)
        return write(text)

    monkeypatch.setattr(sys.stdout, "write", writes_meanwhile)
    assert told(capsys, "logs", "my-run", "--follow") == (0, "first line\nlast line\nbetween\n")


def test_logs_that_follow_read_nothing_of_the_run_folder_again(
    run: "subprocess.Popen[bytes]", folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = sys.stdout.write

    def closes_the_folder(text: str) -> int:
        (folder / "settings.yaml").write_text("run: {")
        threading.Timer(1.0, run.terminate).start()
        return write(text)

    monkeypatch.setattr(sys.stdout, "write", closes_the_folder)
    assert told(capsys, "logs", "my-run", "--follow") == (0, "first line\nlast line\n")


def test_stop_ends_a_run_as_ctrl_c_does_and_waits_for_it(
    run: "subprocess.Popen[bytes]", capsys: pytest.CaptureFixture[str]
) -> None:
    assert told(capsys, "stop", "my-run") == (0, "my-run has ended.\n")
    assert run.wait(60.0) == 0
    status, printed = told(capsys)
    assert status == 0
    assert "ended" in printed
    assert "my-run: last line" in printed


def test_an_ended_run_is_listed_with_how_it_ended(tmp_path: Path) -> None:
    log = tmp_path / "mine.log"
    log.write_text("step\nEnded at step 4: all steps are done.\nReport: a.html\nNext:\n  sluice audit runs/mine\n")
    assert last_word(log) == "Ended at step 4: all steps are done."
    log.write_text("step\nlearner rank 0: no memory\n\n")
    assert last_word(log) == "learner rank 0: no memory"
    log.write_text("")
    assert last_word(log) == last_word(None) == ""


def test_stop_of_a_run_that_has_ended_says_so(
    run: "subprocess.Popen[bytes]", capsys: pytest.CaptureFixture[str]
) -> None:
    run.terminate()
    run.wait(60.0)
    assert told(capsys, "stop", "my-run") == (0, "my-run has ended.\n")
    assert told(capsys, "stop") == (1, "sluice runs: no run uses this cluster.\n")
    assert told(capsys, "stop", "other") == (1, "sluice runs: other is not known here; none is.\n")


def test_run_of_another_machine_that_shares_the_home_is_not_ended_by_its_number_here(
    run: "subprocess.Popen[bytes]", home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told_by_run = json.loads((home / "run.lock").read_text())
    (home / "run.lock").write_text(json.dumps({**told_by_run, "processes": "another-boot/4026531836"}))
    assert "running elsewhere" in told(capsys)[1]
    status, printed = told(capsys, "stop", "my-run")
    assert (status, printed.startswith("sluice runs: another machine's run (my-run) uses this cluster.")) == (1, True)
    assert run.poll() is None


def test_run_of_another_name_is_refused_with_those_that_there_are(
    run: "subprocess.Popen[bytes]", capsys: pytest.CaptureFixture[str]
) -> None:
    assert told(capsys, "stop", "other") == (1, "sluice runs: other is not known here; my-run is.\n")
    assert run.poll() is None


def test_where_nothing_runs_and_nothing_ran_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys) == (0, "No run uses this cluster, and sluice run --no-wait has started none.\n")
    assert told(capsys, "stop") == (1, "sluice runs: no run uses this cluster.\n")
    assert told(capsys, "logs") == (1, "sluice runs: no run is known here. sluice run starts one.\n")


def test_step_of_a_run_before_its_first_is_0(tmp_path: Path) -> None:
    assert step_of(tmp_path) == "0 of ?"
    (tmp_path / "settings.yaml").write_text("run: {max_steps: 7}\n")
    assert step_of(tmp_path) == "0 of 7"


def test_command_imports_no_ray_before_its_environment_is_set() -> None:
    # Ray reads how to authenticate when it is first imported.
    probe = "import sys, deploy.runs.command; print('ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout == "False\n"
