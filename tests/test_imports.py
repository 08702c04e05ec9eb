"""What importing a room costs: a heavy library has one door, and nobody goes through it by accident."""

import json
import pkgutil
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import protocol
from tests.fakes.warm_process import run_warm

# In the form of a framework that only those who run it have.
_OF_A_FRAMEWORK = "tests.benchmarks.framework_agent.agent"
_PROTOCOL = [module.name for module in pkgutil.walk_packages(protocol.__path__, "protocol.")]
_PROBE = """\
import importlib, json, sys
modules, heavy = json.loads(sys.argv[1])
for module in modules:
    importlib.import_module(module)
print(json.dumps([name for name in heavy if name in sys.modules]))
"""


def heavy_imports(modules: Sequence[str], heavy: Sequence[str]) -> list[str]:
    """Return which of the heavy libraries a fresh interpreter holds after it imported the modules."""
    command = [sys.executable, "-c", _PROBE, json.dumps([modules, heavy])]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
    found: list[str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        pytest.param(_PROTOCOL, ["torch", "vllm", "ray", "deepspeed", "transformers"], id="protocol"),
        pytest.param(["learner.run.command"], ["torch", "ray"], id="learner.run"),
    ],
)
def test_import_loads_no_heavy_library(modules: list[str], heavy: list[str]) -> None:
    assert heavy_imports(modules, heavy) == []


def test_probe_tells_a_library_that_was_imported() -> None:
    assert heavy_imports(["email"], ["email", "torch"]) == ["email"]


def test_a_learner_rank_imports_nothing_of_the_coordinator() -> None:
    probe = (
        "import sys, learner.rank.process, learner.rank.rank, learner.rank.start, learner.cluster.servers\n"
        "print(sorted(name for name in sys.modules if name.startswith('learner.coordinator')))"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=240)

    assert done.stdout == "[]\n"


def test_every_command_of_the_tests_can_be_imported() -> None:
    # Types are checked for the product alone: a name that a rig or a benchmark lost would show only when it is run.
    root = Path(__file__).parent
    folders = (root / "chaos", root / "benchmarks", root / "fakes")
    modules = [path.relative_to(root.parent) for folder in folders for path in sorted(folder.rglob("*.py"))]
    names = [str(path.with_suffix("")).replace("/", ".") for path in modules if not path.name.startswith("test_")]
    names.remove(_OF_A_FRAMEWORK)
    done = run_warm("tests.fakes.import_all", *names)
    assert done.returncode == 0, done.stderr


def test_vllm_is_imported_by_its_doors_alone() -> None:
    root = Path(__file__).parents[1]
    doors = {"rollout/environments/tool_use/call_formats.py"}
    importers = {
        str(path.relative_to(root))
        for path in sorted((root / "rollout").rglob("*.py"))
        if path.parent.parts[-1] != "weights" and re.search(r"^\s*(from|import) vllm\b", path.read_text(), re.MULTILINE)
    }
    assert {name for name in importers if not name.startswith("rollout/engine/")} == doors
