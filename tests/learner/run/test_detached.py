"""`--no-wait`: what is said of a run that ends before it has the cluster."""

import os
import threading
from pathlib import Path

import psutil
import pytest

from learner.run.detached import start_detached
from protocol.errors import OperatorError
from protocol.node.current_run import log_of_run, logs_of_runs
from tests.fakes.waiting import wait_until


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()


def kill_command_of(config: Path) -> None:
    """Kill the process that was started with this settings file, once it is there."""

    def found() -> list[psutil.Process]:
        return [child for child in psutil.Process().children() if str(config) in child.cmdline()]

    wait_until(lambda: bool(found()))
    for process in found():
        process.kill()


def test_run_in_the_background_that_is_killed_before_it_begins_is_said_to_be(tmp_path: Path) -> None:
    never_written = tmp_path / "settings.yaml"
    os.mkfifo(never_written)
    killing = threading.Thread(target=kill_command_of, args=(never_written,))
    killing.start()
    with pytest.raises(OperatorError) as caught:
        start_detached(["--config", str(never_written), "--no-wait"], "mine")
    killing.join()
    assert str(caught.value) == f"The run was ended by SIGKILL before it began. See {log_of_run('mine')}."


def test_run_in_the_background_that_ends_at_once_ends_with_its_own_status_and_words(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "settings.yaml"
    assert start_detached(["--config", str(missing), "--no-wait"], "mine") == 2
    assert capfd.readouterr().err.startswith(f"settings: --config {missing} cannot be read")


def test_output_of_the_run_before_of_the_name_stays_beside_the_new_ones(tmp_path: Path) -> None:
    log = log_of_run("mine")
    log.parent.mkdir(parents=True)
    log.write_text("The disk is full.")
    start_detached(["--config", str(tmp_path / "missing.yaml"), "--no-wait"], "mine")
    assert log.with_name("mine.log.previous").read_text() == "The disk is full."
    assert logs_of_runs() == [log]
