"""A copy of a warm process is a command like another."""

import signal
import subprocess

import pytest

from tests.fakes.warm_process import WarmCommand, run_warm


def test_command_has_its_own_output_and_exit_code() -> None:
    told, refused = run_warm("json.tool", "--help"), run_warm("json.tool", "no-such-file")
    assert (told.returncode, told.stderr) == (0, "")
    assert told.stdout.startswith("usage: ")
    assert refused.returncode == 2
    assert "no-such-file" in refused.stderr


def test_command_that_takes_too_long_is_ended() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run_warm("http.server", "0", "--bind", "127.0.0.1", timeout=0.5)


def test_command_that_was_killed_says_so() -> None:
    command = WarmCommand("http.server", "0", "--bind", "127.0.0.1")
    command.kill()
    assert command.returncode == -signal.SIGKILL
