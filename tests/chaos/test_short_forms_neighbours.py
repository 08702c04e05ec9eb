"""The short forms of the chaos commands for neighbours and numbers, as continuous integration runs them."""

import re
import subprocess

import pytest

from tests.fakes.warm_process import run_warm

SHORT_FORMS = {
    "bad_rewards": r"invented=0 misassigned=0 lost=0 trained_twice=0 dead_letters=0 .*",
    "bad_retriever": r"wrong_observations=0 error_texts=0 lost=0 trained_twice=0 dead_letters=0 .*",
    "agents": r"samples=64 .*lost=0 trained_twice=0 wrong_rewards=0 wrong_tokens=0 duplicates=0 ",
    "services": r"kills=4 .*lost=0 wrong=0 trained_twice=0 dead_letters=0 ",
    "nonfinite": r"injected=10 applied=0 pushed=0 saved=0 recorded=10 intact=10 steps_after=2 ",
    "bad_pushes": r"pushes=12 .*unexpected_failures=0 .*wrong_tokens=0 served_unsynced=0 ",
}


@pytest.mark.stack
@pytest.mark.parametrize("name", [name for name in SHORT_FORMS if name != "nonfinite"])
def test_short_form_holds(name: str) -> None:
    expect_holds(name, run_warm(f"tests.chaos.{name}", "--seed", "1", "--short"))


@pytest.mark.stack
@pytest.mark.ranks
def test_nonfinite_holds_in_its_short_form() -> None:
    expect_holds("nonfinite", run_warm("tests.chaos.nonfinite", "--seed", "1", "--short"))


def expect_holds(name: str, finished: "subprocess.CompletedProcess[str]") -> None:
    figures = finished.stdout.splitlines()[-1] if finished.stdout else ""
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-3000:]
    assert re.fullmatch(rf"{name} .*{SHORT_FORMS[name]}holds=yes", figures), figures
