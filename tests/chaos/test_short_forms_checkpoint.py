"""The chaos commands of checkpoints in their short form."""

import subprocess
import sys
from pathlib import Path

import pytest


def test_checkpoint_mutations_holds_in_its_short_form() -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "tests.chaos.checkpoint_mutations", "--short"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    last = finished.stdout.splitlines()[-1]
    assert last == "checkpoint_mutations mutations=80 corrupt_loads=0 wrong_choice=0 holds=yes"


@pytest.mark.stack
@pytest.mark.timeout(600)
def test_checkpoint_lies_holds_in_its_short_form() -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "tests.chaos.checkpoint_lies", "--short"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    last = finished.stdout.splitlines()[-1]
    assert last == "checkpoint_lies lies=36 passed=0 wrong_reason=0 false_alarms=0 holds=yes"
