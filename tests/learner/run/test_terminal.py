"""What is printed to a reader that has left: nothing is raised, and Python complains of nothing at its end."""

import subprocess
import sys


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
