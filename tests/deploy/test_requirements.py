"""What the code imports is named in deploy/requirements, and what is named without being imported says what for."""

import ast
import re
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("protocol", "rollout", "rewards", "retriever", "learner", "deploy")
# The engine and torch are each platform's own: cpu.in and gpu.in name them.
_BY_PLATFORM = {"torch", "vllm"}
# Users' tool files import it; where it is not installed, we stand in for the names that they use.
_STOOD_IN_FOR = {"verl"}
_LATE = re.compile(r"import_module\(\"(\w+)")


def imported(*folders: str) -> set[str]:
    """Return the top-level modules of others that the Python files in these folders import, late or at once."""
    found = set()
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
        found |= set(_LATE.findall(text))
    return found - set(sys.stdlib_module_names) - {*ROOMS, "tests"}


def named() -> dict[str, str]:
    """Return what run.in and base.in name, lower case with dashes, and the comment beside it."""
    text = "".join((ROOT / "deploy/requirements" / name).read_text() for name in ("run.in", "base.in"))
    lines = [line for line in text.splitlines() if line[:1].isalpha()]
    parts = [re.match(r"([\w.-]+)[^#]*(#.*)?", line) for line in lines]
    return {part[1].lower().replace("_", "-"): part[2] or "" for part in parts if part}


@cache
def installed() -> Mapping[str, list[str]]:
    """Return the distributions of each module: to find them reads all that is installed."""
    return packages_distributions()


def distributions_of(module: str) -> set[str]:
    return {name.lower().replace("_", "-") for name in installed().get(module, [module])}


def test_what_the_product_imports_is_named() -> None:
    wanted = imported(*ROOMS) - _BY_PLATFORM - _STOOD_IN_FOR
    missing = {module for module in wanted if not distributions_of(module) & set(named())}
    assert missing == set()


def test_what_is_named_and_not_imported_says_what_for() -> None:
    used = {name for module in imported(*ROOMS) for name in distributions_of(module)}
    checking = (ROOT / "deploy/requirements/base.in").read_text().partition("# installing")[2]
    silent = {
        name for name, comment in named().items() if name not in used and not comment and name not in checking.lower()
    }
    assert silent == set()


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_lock_pins_all_that_is_named(kind: str) -> None:
    lock = (ROOT / f"requirements-{kind}.lock").read_text().lower().replace("_", "-")
    assert [name for name in named() if not re.search(rf"^{re.escape(name)}==", lock, re.MULTILINE)] == []
