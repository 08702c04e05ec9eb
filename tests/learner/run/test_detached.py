"""`--no-wait`: what is said of a run that ends before it has the cluster."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from learner.run.detached import stamp_of, start_detached, wait_until_begun
from protocol.errors import OperatorError
from protocol.node.current_run import log_of_run, logs_of_runs
from tests.fakes.waiting import wait_until

# A run's command as `wait_until_begun` sees it: it has the cluster, checks it, and then makes its folder ready or ends.
_RUN = """
import sys, time
from pathlib import Path
from protocol.node.current_run import using_cluster
folder, ends = Path(sys.argv[1]), sys.argv[2] == "ends"
with using_cluster(folder.name, folder):
    time.sleep(0.5)
    if ends:
        print("settings: the cluster has no room.")
        sys.exit(2)
    (folder / ".settings.yaml").write_text("")
    (folder / ".settings.yaml").replace(folder / "settings.yaml")
    time.sleep(60)
"""


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
        start_detached(["--config", str(never_written), "--no-wait"], tmp_path / "mine")
    killing.join()
    assert str(caught.value) == f"The run was ended by SIGKILL before it began. See {log_of_run('mine')}."


def test_run_in_the_background_that_ends_at_once_ends_with_its_own_status_and_words(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "settings.yaml"
    assert start_detached(["--config", str(missing), "--no-wait"], tmp_path / "mine") == 2
    assert capfd.readouterr().err.startswith(f"settings: --config {missing} cannot be read")


def test_output_of_the_run_before_of_the_name_stays_beside_the_new_ones(tmp_path: Path) -> None:
    log = log_of_run("mine")
    log.parent.mkdir(parents=True)
    log.write_text("The disk is full.")
    start_detached(["--config", str(tmp_path / "missing.yaml"), "--no-wait"], tmp_path / "mine")
    assert log.with_name("mine.log.previous").read_text() == "The disk is full."
    assert logs_of_runs() == [log]


@pytest.mark.parametrize(("what", "status"), [("ends", 2), ("begins", 0)])
def test_run_in_the_background_has_begun_once_its_checks_of_the_cluster_are_done(
    tmp_path: Path, what: str, status: int, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, log = tmp_path / "mine", tmp_path / "log"
    folder.mkdir()
    (folder / "settings.yaml").write_text("")  # of an earlier start
    before = stamp_of(folder)
    with log.open("wb") as output:
        run = subprocess.Popen([sys.executable, "-c", _RUN, str(folder), what], stdout=output)
    with run:
        assert wait_until_begun(run, log, before) == status
        run.kill()
    told = capfd.readouterr()
    assert told.err == ("settings: the cluster has no room.\n" if what == "ends" else "")
    assert told.out.startswith("" if what == "ends" else "The run mine continues in the background (process ")
