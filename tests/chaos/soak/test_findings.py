"""A soak's verdict can fail: each promise that is broken is named."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.soak.findings import Findings
from tests.chaos.soak.memory_growth import MemoryGrowth
from tests.chaos.soak.step_lines import is_whole, read_lines, steps_per_s

GOOD = Findings(
    num_faults=20,
    has_recovered=True,
    is_whole=True,
    growth={"rank": 0.04, "fleet": -0.2},
    goodput=0.5,
    score=0.81,
    calm_score=0.9,
)
PROCESS = (17, 1000.0)  # began at second 1000


def test_soak_that_kept_its_promises_has_none_broken() -> None:
    assert GOOD.broken() == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_faults": 0}, "no fault came"),
        ({"has_recovered": False}, "it does not train since the faults are over"),
        ({"is_whole": False}, "steps are missing"),
        ({"growth": {"rank": 0.051, "keeper": 0.06, "fleet": 0.0}}, "memory of keeper, rank grew by more than 5%"),
        ({"num_given_up": 34}, "34 prompts were given up"),
        ({"score": 0.79}, "the held-out score 0.79 is below 0.9 without faults"),
        ({"goodput": 0.79, "is_goodput_held": True}, "goodput 0.79 is below 0.8"),
    ],
)
def test_broken_promise_is_named(change: dict[str, Any], words: str) -> None:
    assert dataclasses.replace(GOOD, **change).broken() == [words]


def test_score_that_was_not_measured_breaks_nothing() -> None:
    assert dataclasses.replace(GOOD, score=None).broken() == []
    assert dataclasses.replace(GOOD, calm_score=None).broken() == []


def noted(*sizes: int, begins_s: float = 600.0, process: tuple[int, float] = PROCESS) -> MemoryGrowth:
    """Return what was noted of one process, a sample each ten seconds since its start."""
    growth = MemoryGrowth(begins_s)
    for number, size in enumerate(sizes):
        growth.note("rank", process, size, process[1] + 10.0 * number)
    return growth


def test_leak_is_seen() -> None:
    sizes = [100] * 60 + [100 + number for number in range(60)]
    assert noted(*sizes).grown() == {"rank": (102.5, 156.5)}


def test_growth_of_a_young_process_does_not_count() -> None:
    sizes = [10 * number for number in range(60)] + [600] * 60
    assert noted(*sizes).grown() == {"rank": (600, 600)}


def test_kind_grows_by_what_its_processes_grow_together() -> None:
    growth = MemoryGrowth(0.0)
    for number in range(18):
        growth.note("engine", (1, 0.0), 100 + (20 if number > 9 else 0), 10.0 * number)
        growth.note("engine", (2, 0.0), 300 - (20 if number > 9 else 0), 10.0 * number)
    assert growth.grown() == {"engine": (400, 400)}


def lines_of(folder: Path, *steps: tuple[int, float]) -> Path:
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, "at_s": at_s}) + "\n" for step, at_s in steps) + '{"step": 9')
    return path


def test_goodput_counts_each_step_once_and_only_of_that_time(tmp_path: Path) -> None:
    lines = read_lines(lines_of(tmp_path, (0, 5.0), (1, 10.0), (2, 20.0), (3, 30.0), (3, 40.0), (4, 60.0)))
    assert steps_per_s(lines, 15.0, 55.0) == 2 / 40.0
    assert is_whole(lines)
    assert not is_whole(lines[1:])
