"""Signals that end a run, a closed terminal, and output whose reader has left, in processes of their own."""

import os
import pty
import signal
import subprocess
import sys

import pytest

# The tests themselves may run in the background of a script, whose processes ignore SIGINT.
_WAIT = """\
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
{before}
from learner.run.terminal import stop_signals
with stop_signals() as stop:
    print("ready", flush=True)
    print("stopped" if stop.wait({wait_s}) else "went on", "by the user" * stop.is_by_user, flush=True)
    if {is_patient}:
        time.sleep(60)
"""


def waiting(before: str = "", wait_s: float = 60.0, is_patient: bool = False) -> "subprocess.Popen[str]":
    code = _WAIT.format(before=before, wait_s=wait_s, is_patient=is_patient)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_first_signal_asks_for_the_end(number: signal.Signals) -> None:
    # The tests themselves may run under nohup, which their processes inherit.
    process = waiting("signal.signal(signal.SIGHUP, signal.SIG_DFL)")
    process.send_signal(number)
    output, errors = process.communicate(timeout=30)
    by = "by the user" if number is signal.SIGINT else ""
    assert (process.returncode, output, errors) == (0, f"stopped {by}\n", "")


def test_second_interrupt_ends_at_once() -> None:
    process = waiting(is_patient=True)
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert process.stdout.readline() == "stopped by the user\n"
    process.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in process.communicate(timeout=30)[1]


def test_hangup_that_nohup_ignores_stays_ignored() -> None:
    process = waiting("signal.signal(signal.SIGHUP, signal.SIG_IGN)", wait_s=0.5)
    process.send_signal(signal.SIGHUP)
    assert process.communicate(timeout=30)[0] == "went on \n"


_ON_TERMINAL = """\
import os, sys
from learner.run.terminal import leave_closed_terminal
assert sys.stdin.readline() == "closed\\n"
leave_closed_terminal()
os.write(1, b"to nobody")
print("to nobody either", flush=True)
os.write(2, b"files stay")
"""


def test_what_is_written_to_a_closed_terminal_goes_nowhere() -> None:
    terminal, end = pty.openpty()
    command = [sys.executable, "-c", _ON_TERMINAL]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=end, stderr=subprocess.PIPE)
    os.close(end)
    os.close(terminal)
    _, errors = process.communicate(b"closed\n", timeout=30)
    assert (process.returncode, errors) == (0, b"files stay")


def piped_to_head(code: str) -> tuple[int, str]:
    """Return (exit status, stderr) of Python code whose reader leaves after one line."""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    with process:
        process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read()
    return process.returncode, errors


def test_lines_to_a_reader_that_has_left_change_nothing() -> None:
    code = (
        "import sys, time\nfrom learner.run.terminal import drop_unwritten, say\n"
        "say('first')\ntime.sleep(0.3)\nsay('second')\nprint('third', flush=True)\ndrop_unwritten()\nsys.exit(3)"
    )
    assert piped_to_head(code) == (3, "")


def test_help_whose_reader_has_seen_enough_ends_well() -> None:
    code = (
        "import sys\nfrom learner.run.command import run_command\n"
        "print('x' * 100_000, flush=True)\nsys.exit(run_command(['--help']))"
    )
    assert piped_to_head(code) == (0, "")
