"""The audit of metrics.jsonl: lines that the ledger tells otherwise, that are missing, or that a kill cut off."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from learner.audit.report import audit_run_folder
from tests.learner.audit.broken_run import Good, break_ledger, lines_of

METRICS_RULES: list[tuple[str, str, list[str]]] = [
    ('"step": 3,', '"step": 5,', [
        "metrics.jsonl, step 5: line 3 follows step 2",
        "metrics.jsonl, step 4: line 4 follows step 5",
    ]),
    ('"step": 2,', '"step": 0,', [
        "metrics.jsonl, step 0: line 2 follows step 1",
        "metrics.jsonl, step 3: line 3 follows step 1",
    ]),
    ('{"step": 2,', '{"step" 2,', [
        "metrics.jsonl: line 2 is not a metrics line",
        "metrics.jsonl, step 3: line 3 follows step 1",
    ]),
    ('"policy_version": 1,', '"policy_version": 2,', [
        "metrics.jsonl, step 1: line 1 says policy_version 2, the ledger 1",
    ]),
    ('"policy_version": 1, ', "", ["metrics.jsonl, step 1: line 1 says policy_version None, the ledger 1"]),
    ('"reward/mean": 0.5', '"reward/mean": Infinity', [
        "metrics.jsonl, step 1: line 1 says reward_mean Inf, the ledger 0.5",
    ]),
    ('"data/num_model_tokens": 8', '"data/num_model_tokens": 9', [
        "metrics.jsonl, step 1: line 1 says num_model_tokens 9, the ledger 8",
    ]),
    ('"data/staleness_max": 1.0', '"data/staleness_max": 0.0', [
        "metrics.jsonl, step 2: line 2 says staleness_max 0, the ledger 1",
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("found", "written", "expected"), METRICS_RULES)
def test_audit_names_what_broke_in_the_metrics(run: Path, found: str, written: str, expected: list[str]) -> None:
    text = (run / "metrics.jsonl").read_text(encoding="utf-8")
    (run / "metrics.jsonl").write_text(text.replace(found, written, 1), encoding="utf-8")
    assert lines_of(run, "metrics") == expected


def test_audit_names_rewards_that_the_metrics_tell_otherwise(run: Path, good: Good) -> None:
    break_ledger(run / "ledger.sqlite", good[1], "UPDATE trajectories SET reward = 1 WHERE \"group\" = '{7}'")
    assert lines_of(run, "metrics") == ["metrics.jsonl, step 4: line 4 says reward_mean 0.5, the ledger 0.75"]


@pytest.mark.parametrize(
    ("num_kept", "expected"),
    [
        (3, "metrics.jsonl: no line tells of step 4, which the ledger accounts for"),
        (1, "metrics.jsonl: no line tells of steps 2 to 4, which the ledger accounts for"),
    ],
)
def test_audit_names_steps_that_the_metrics_lack(run: Path, num_kept: int, expected: str) -> None:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:num_kept]), encoding="utf-8")
    assert lines_of(run, "metrics") == [expected]


def test_audit_notes_one_step_that_a_kill_left_out_of_the_ledger_and_names_more(run: Path) -> None:
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 5, "policy_version": 4}\n{"step": 6, "poli')
    report = audit_run_folder(run)
    assert report.holds
    assert report.notes == [
        "metrics.jsonl: the last line is cut off, as a kill leaves it.",
        "metrics.jsonl: the line of step 5 was written, its step not yet committed.",
    ]
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('cy_version": 5}\n')
    assert lines_of(run, "metrics") == ["metrics.jsonl, step 6: line 6 is of a step that the ledger does not know"]


def test_audit_notes_a_line_that_waits_for_an_evaluation_and_names_others(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    with closing(sqlite3.connect(run / "ledger.sqlite")) as db:
        db.execute("INSERT INTO meta VALUES ('held_line', ?)", (lines[3].strip(),))
        db.commit()
    (run / "metrics.jsonl").write_text("".join(lines[:3]), encoding="utf-8")
    report = audit_run_folder(run)
    assert report.holds
    assert report.notes == ["metrics.jsonl: the line of step 4 waits for an evaluation; the next start writes it."]
    (run / "metrics.jsonl").write_text("".join(lines[:2]), encoding="utf-8")
    assert lines_of(run, "metrics") == ["metrics.jsonl: no line tells of steps 3 to 4, which the ledger accounts for"]


def test_audit_notes_metrics_that_begin_with_a_start_from_another_folder(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[2:]), encoding="utf-8")
    report = audit_run_folder(run)
    assert report.holds
    assert report.notes == [
        "metrics.jsonl: begins at step 3; earlier ones are in the folder that the run was resumed from."
    ]
    (run / "metrics.jsonl").write_text("".join(lines[1:]), encoding="utf-8")
    assert lines_of(run, "metrics") == ["metrics.jsonl, step 2: line 1 follows step 0"]


def test_line_of_the_first_evaluation_is_there_once(run: Path, good: Good) -> None:
    text = (run / "metrics.jsonl").read_text(encoding="utf-8")
    held_out = "UPDATE trajectories SET \"group\" = 'eval-0-a', kind = 'eval' WHERE \"group\" = '{10}'"
    break_ledger(run / "ledger.sqlite", good[1], held_out)
    assert lines_of(run, "metrics") == ["metrics.jsonl: no line tells of step 0, whose evaluation the ledger has"]
    (run / "metrics.jsonl").write_text('{"step": 0}\n' + text, encoding="utf-8")
    assert audit_run_folder(run).holds
    (run / "metrics.jsonl").write_text('{"step": 0}\n' * 2 + text, encoding="utf-8")
    assert lines_of(run, "metrics") == ["metrics.jsonl, step 0: line 2 follows step 0"]
    waits = "INSERT INTO meta VALUES ('held_line', '{{\"step\": 0, \"policy_version\": 0}}')"
    break_ledger(run / "ledger.sqlite", good[1], waits)
    (run / "metrics.jsonl").write_text(text, encoding="utf-8")
    assert audit_run_folder(run).holds


@pytest.mark.parametrize(
    ("before", "expected"), [("another", []), ("run1", ["metrics.jsonl, step 3: line 1 follows step 0"])]
)
def test_metrics_that_begin_with_a_resume_of_the_run_itself_lack_lines(
    run: Path, good: Good, before: str, expected: list[str]
) -> None:
    starts = f"INSERT INTO terms VALUES (1, 'run', '{before}'), (3, 'run', 'run1')"  # noqa: S608
    break_ledger(run / "ledger.sqlite", good[1], starts)
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[2:]), encoding="utf-8")
    assert lines_of(run, "metrics") == expected
