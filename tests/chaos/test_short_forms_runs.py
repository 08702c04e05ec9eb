"""Whole runs under faults, in the short form of each command."""

import re

import pytest

from tests.fakes.warm_process import run_warm

_SHORT_FORMS = {
    "kills": r"killed_coordinator=4 killed_learner=4 killed_server=12 lost=0 trained_twice=0 unaccounted=0 .*passed",
    "kills --filtered": r"killed_coordinator=2 killed_learner=2 killed_server=5 filtered=\d+ filtered_and_trained=0 "
    r"lost=0 trained_twice=0 unaccounted=0 .*passed",
    "crash_points": r"failpoints=4 deaths=8 failed=0",
    "bad_network": r"trajectories=200 messages=\d+ lost=0 trained_twice=0 unaccounted=0 audit=passed",
    "dead_server": r"kills=4 median_s=[\d.]+ p99_s=[\d.]+ max_s=[\d.]+ limit_s=30 audit=passed",
    "long_conversations": r"conversations=16 turns=12 spared=0 versions=\d+ calls=\d+ repeated=\d+ lost=0 "
    r"lost_turns=0 called_twice=0 wrong=0 audit=passed",
    "busy_server": r"seconds=15 stalls=\d+ stall_s=3 steps=\d+ samples_lost_to_deaths=0 audit=passed",
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", _SHORT_FORMS)
def test_short_form_holds(name: str) -> None:
    module, *flags = name.split()
    finished = run_warm(f"tests.chaos.{module}", "--seed", "1", "--short", *flags)
    figures = finished.stdout.splitlines()[-1] if finished.stdout else ""
    assert re.fullmatch(rf"{module} {_SHORT_FORMS[name]} holds=yes", figures), finished.stdout[-3000:] + finished.stderr
    assert finished.returncode == 0


@pytest.mark.timeout(300)
def test_a_stalled_learner_leaves_the_window_and_the_memory_bounded() -> None:
    # How fast the rate comes back is the machine's matter, which may be busy; what is outstanding is not.
    finished = run_warm("tests.chaos.stall", "--seed", "1", "--short")
    figures = dict(part.split("=") for part in finished.stdout.splitlines()[-1].split()[1:])
    assert (figures["most_outstanding"], figures["window"], figures["audit"]) == ("256", "256", "passed")
    assert float(figures["memory_growth_mb"]) <= float(figures["memory_limit_mb"])
