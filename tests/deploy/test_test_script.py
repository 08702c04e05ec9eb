"""deploy/test.sh: all lanes run, their outputs are shown, one line counts all; a failure in any is its status.

A test that fails is run once more.
"""

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

@pytest.mark.stack
@pytest.mark.ranks
def test_of_ranks(tmp_path):
    assert "others" in tmp_path.parts

def test_that_is_skipped():
    pytest.skip()

def _fails_once(name):
    path = os.environ.get("ONCE", "") and os.environ["ONCE"] + name
    if path and not os.path.exists(path):
        open(path, "w").close()
        raise AssertionError(name)

def test_that_is_luckier_later():
    _fails_once("one")

@pytest.fixture
def place():
    _fails_once("two")

@pytest.mark.stack
def test_whose_place_is_ready_later(place):
    pass
"""
TESTS_OF_THE_LEARNER = """
import atexit, os

def test_of_a_unit():
    assert "unit" not in os.environ.get("FAILING", "")
    atexit.register(lambda: os.environ.get("FAILING") is None and os.abort())  # as native threads may at Python's end
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    folder = tmp_path / "clone"
    for name in ("deploy", "tests/learner", "tests/textbook", "tests/flow", "tests/rollout/engine", ".venv/bin"):
        (folder / name).mkdir(parents=True)
    shutil.copy(ROOT / "deploy" / "test.sh", folder / "deploy")
    (folder / "tests" / "test_some.py").write_text(TESTS)
    (folder / "tests" / "learner" / "test_more.py").write_text(TESTS_OF_THE_LEARNER)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n  stack: a mark\n  ranks: another\n")
    scripts = dict.fromkeys(("deploy/setup.sh", *(f".venv/bin/{x}" for x in ("ruff", "mypy"))), "exit 0")
    scripts |= {".venv/bin/lint-imports": "exit 0", ".venv/bin/python": f'exec {sys.executable} "$@"'}
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (folder / name).chmod(0o755)
    return folder


def run(clone: Path, **environment: str) -> tuple[int, list[str]]:
    """Return its exit status and what it printed."""
    finished = subprocess.run(
        ["bash", str(clone / "deploy" / "test.sh")],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, **environment},
    )
    return finished.returncode, finished.stdout.splitlines()


def test_all_lanes_are_shown_and_counted_and_a_failure_in_the_background_is_the_status(clone: Path) -> None:
    returned, lines = run(clone, FAILING="unit")
    assert (returned, lines[-1]) == (1, "4 passed, 1 failed, 1 skipped")
    assert sum("deselected" in line for line in lines) == 2  # of the others and of the stack
    assert any(line.startswith("FAILED tests/learner/test_more.py::test_of_a_unit") for line in lines)


def test_what_fails_once_is_run_again_and_named(clone: Path, tmp_path: Path) -> None:
    returned, lines = run(clone, ONCE=f"{tmp_path}/was-here-")
    assert (returned, lines[-1]) == (0, "5 passed (2 at the second try), 0 failed, 1 skipped")
    for name in ("test_that_is_luckier_later", "test_whose_place_is_ready_later"):
        assert f"PASSED tests/test_some.py::{name}" in lines
