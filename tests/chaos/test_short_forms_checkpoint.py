"""The chaos commands of checkpoints, and of pushes to model families, in their short form."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("command", "counts"),
    [
        ("checkpoint_mutations", "mutations=80 corrupt_loads=0 wrong_choice=0"),
        pytest.param("model_families", "families=1 held=1", marks=[pytest.mark.stack, pytest.mark.timeout(300)]),
    ],
)
def test_command_holds_in_its_short_form(command: str, counts: str) -> None:
    finished = subprocess.run(
        [sys.executable, "-m", f"tests.chaos.{command}", "--short"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stdout.splitlines()[-1] == f"{command} {counts} holds=yes"
