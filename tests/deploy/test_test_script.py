"""deploy/test.sh: both lanes run, both outputs are shown, one line counts all; a failure in either is its status."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
import os, pytest

@pytest.mark.stack
def test_of_the_stack():
    assert "stack" not in os.environ.get("FAILING", "")

def test_of_a_unit():
    assert "unit" not in os.environ.get("FAILING", "")

def test_that_is_skipped():
    pytest.skip()
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    folder = tmp_path / "clone"
    for name in ("deploy", "tests", ".venv/bin"):
        (folder / name).mkdir(parents=True)
    shutil.copy(ROOT / "deploy" / "test.sh", folder / "deploy")
    (folder / "tests" / "test_some.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = stack: a mark\n")
    scripts = dict.fromkeys(("deploy/setup.sh", *(f".venv/bin/{x}" for x in ("ruff", "mypy"))), "exit 0")
    scripts |= {".venv/bin/lint-imports": "exit 0", ".venv/bin/python": f'exec {sys.executable} "$@"'}
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (folder / name).chmod(0o755)
    return folder


def run(clone: Path, failing: str) -> tuple[int, list[str]]:
    """Return its exit status and what it printed."""
    finished = subprocess.run(
        ["bash", str(clone / "deploy" / "test.sh")],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "FAILING": failing},
    )
    return finished.returncode, finished.stdout.splitlines()


def test_both_lanes_are_shown_and_counted_and_a_failure_in_the_background_is_the_status(clone: Path) -> None:
    returned, lines = run(clone, failing="unit")
    assert (returned, lines[-1]) == (1, "1 passed, 1 failed, 1 skipped")
    assert sum("deselected" in line for line in lines) == 2
