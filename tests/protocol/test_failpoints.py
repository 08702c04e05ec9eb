"""Failpoints: nothing without the variable, and with it exactly what it says, at the pass that it says."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_PASS_FIVE_TIMES = """
from protocol.failpoints import FailpointError, failpoint
for number in range(1, 6):
    try:
        failpoint("checkpoint.commit.begun")
        failpoint("checkpoint.commit.renamed")
    except FailpointError as error:
        print(f"{error} raised", end=" ")
    print(number, end=" ", flush=True)
"""


def run(setting: str | None, code: str = _PASS_FIVE_TIMES) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if name != "SLUICE_FAILPOINT"}
    environment |= {} if setting is None else {"SLUICE_FAILPOINT": setting}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, cwd=_ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("setting", "said", "code"),
    [
        (None, "1 2 3 4 5 ", 0),
        ("", "1 2 3 4 5 ", 0),
        ("checkpoint.commit.renamed:kill", "", -signal.SIGKILL),
        ("checkpoint.commit.renamed:kill@3", "1 2 ", -signal.SIGKILL),
        ("checkpoint.commit.renamed:kill@6", "1 2 3 4 5 ", 0),
        ("checkpoint.commit.renamed:raise@2", "1 failpoint checkpoint.commit.renamed raised 2 3 4 5 ", 0),
        ("checkpoint.commit.verified:kill", "1 2 3 4 5 ", 0),
    ],
)
def test_failpoint_acts_at_its_pass_and_at_no_other(setting: str | None, said: str, code: int) -> None:
    finished = run(setting)
    assert (finished.stdout, finished.returncode) == (said, code), finished.stderr


@pytest.mark.parametrize(("passes", "num_stops"), [("2", 1), ("every", 5)])
def test_failpoint_stops_a_process_that_can_be_continued(passes: str, num_stops: int) -> None:
    environment = {**os.environ, "SLUICE_FAILPOINT": f"checkpoint.commit.renamed:stop@{passes}"}
    command = [sys.executable, "-c", _PASS_FIVE_TIMES]
    with subprocess.Popen(command, env=environment, cwd=_ROOT, stdout=subprocess.PIPE, text=True) as process:
        for _ in range(num_stops):
            _, status = os.waitpid(process.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status)
            process.send_signal(signal.SIGCONT)
        assert process.stdout is not None
        assert process.stdout.read() == "1 2 3 4 5 "
        assert process.wait() == 0


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("nowhere:kill", "there is no failpoint 'nowhere'; see protocol.failpoints.FAILPOINTS."),
        ("checkpoint.commit.renamed", "'' is not kill, raise or stop, with @NUMBER or not."),
        ("checkpoint.commit.renamed:explode", "'explode' is not kill, raise or stop, with @NUMBER or not."),
        ("checkpoint.commit.renamed:kill@0", "'0' is not the number of a pass, counted from 1."),
        ("checkpoint.commit.renamed:kill@x", "'x' is not the number of a pass, counted from 1."),
    ],
)
def test_wrong_setting_ends_the_process_when_it_starts(setting: str, message: str) -> None:
    finished = run(setting)
    assert finished.returncode == 1
    assert finished.stderr.splitlines()[-1] == f"ValueError: SLUICE_FAILPOINT = {setting}: {message}"


def test_name_that_is_not_listed_raises_while_a_failpoint_is_set() -> None:
    code = "from protocol.failpoints import failpoint; failpoint('elsewhere')"
    assert run(None, code).returncode == 0
    finished = run("checkpoint.commit.renamed:kill", code)
    assert finished.stderr.splitlines()[-1] == (
        "ValueError: failpoint('elsewhere') is not in protocol.failpoints.FAILPOINTS."
    )
