"""Deaths while a checkpoint is saved, a run folder is prepared and the books are kept: the next start goes on."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from protocol.failpoints import FAILPOINTS
from tests.learner.checkpoint import crash_lives

_ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Return failpoint -> its cases: the state that the life began in, the pass, whether it was met, what was wrong."""
    finished = subprocess.run(
        [sys.executable, crash_lives.__file__, str(tmp_path_factory.mktemp("lives"))],
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    cases: dict[str, list[dict[str, Any]]] = {}
    for line in finished.stdout.splitlines():
        case = json.loads(line)
        cases.setdefault(case["name"], []).append(case)
    return cases


@pytest.mark.parametrize("name", crash_lives.REACHABLE)
def test_death_at_a_failpoint_leaves_latest_valid_and_the_next_start_ends_the_run(
    lives: dict[str, list[dict[str, Any]]], name: str
) -> None:
    assert [case for case in lives[name] if case["wrong"]] == []
    assert any(case["is_met"] for case in lives[name])


def test_the_code_has_every_failpoint_and_no_other() -> None:
    placed = set()
    for room in ("learner", "protocol", "rollout", "deploy"):
        for path in (_ROOT / room).rglob("*.py"):
            placed |= {call.args[0].value for call in _failpoint_calls(ast.parse(path.read_text(encoding="utf-8")))}
    assert placed == set(FAILPOINTS)
    assert len(set(FAILPOINTS)) == len(FAILPOINTS) >= 25


def _failpoint_calls(tree: ast.AST) -> list[Any]:
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name))
    return [call for call in calls if getattr(call.func, "id", None) == "failpoint"]
