"""Survivorship: attempts and skips by answer length, and the sentence about them."""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from learner.audit.counts import Decile, compare_lengths
from learner.audit.run import AuditedRun
from learner.ledger.ledger import Ledger
from protocol.settings.settings import Settings
from tests.protocol.wire.examples import example_facts


@pytest.fixture
def run(tmp_path: Path) -> Iterator[AuditedRun]:
    Ledger(tmp_path / "ledger.sqlite").close()
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as db:
        yield AuditedRun(tmp_path, Settings(), [], db, b"", [])


def write_prompts(
    run: AuditedRun, number: int, attempts: Callable[[int], int], is_skipped: Callable[[int], bool]
) -> None:
    """Write prompts of which the one at place i has one answer of i + 1 tokens."""
    with closing(Ledger(run.folder / "ledger.sqlite")) as ledger:
        for i in range(number):
            group = f"e0-{i}"
            ledger.lease(group, 0, str(i), i, "s1", attempts(i))
            ledger.add_trajectory(example_facts(group=group))
            ledger.set_state([group], "skipped" if is_skipped(i) else "trained", 1, "given up")
    run.db.execute('UPDATE trajectories SET num_model_tokens = 1 + CAST(substr("group", 4) AS INTEGER)')
    run.db.commit()


def test_lengths_show_that_long_answers_are_lost(run: AuditedRun) -> None:
    write_prompts(run, 200, attempts=lambda i: 1 + (i >= 140 and i % 2), is_skipped=lambda i: i >= 180 and i % 4 == 0)
    found = compare_lengths(run)
    assert found.deciles[0] == Decile(1, 20, 20, 0, 0, 1.0)
    assert found.deciles[9] == Decile(181, 200, 20, 10, 5, 1.5)
    assert found.sentence == (
        "The prompts with the longest three tenths of the answers were leased again more often than the others "
        "(50.00% against 0.00%), and skipped more often than the others (8.33% against 0.00%)."
    )


def test_lengths_show_nothing_when_it_falls_on_all_alike(run: AuditedRun) -> None:
    write_prompts(run, 200, attempts=lambda i: 1 + (i % 10 == 0), is_skipped=lambda i: i % 20 == 0)
    assert compare_lengths(run).sentence == (
        "The prompts with the longest three tenths of the answers were not leased again more often than the others "
        "(10.00% against 10.00%), and not skipped more often than the others (5.00% against 5.00%)."
    )


def test_lengths_of_a_skipped_prompt_are_those_of_what_was_thrown_away(run: AuditedRun) -> None:
    write_prompts(run, 10, attempts=lambda i: 1, is_skipped=lambda i: i >= 8)
    run.db.execute("DELETE FROM trajectories WHERE \"group\" IN ('e0-8', 'e0-9')")
    run.db.execute("INSERT INTO waste VALUES ('e0-8', 0, 1, 'stale', 40, 0), ('e0-8', 0, 2, 'stale', 60, 0)")
    run.db.execute("INSERT INTO waste VALUES ('e0-8', 1, 3, 'failed', 0, 0)")  # nothing was written: no length
    found = compare_lengths(run)
    assert found.deciles[-2:] == [Decile(50, 50, 1, 0, 1, 1.0), Decile(None, None, 1, 0, 1, 1.0)]
    assert found.sentence == "Too few prompts are accounted for to compare long answers with short ones."


def test_lengths_leave_out_prompts_that_are_still_out(run: AuditedRun) -> None:
    with closing(Ledger(run.folder / "ledger.sqlite")) as ledger:
        ledger.lease("e0-a", 0, "a", 0, "s1", 5)
    assert compare_lengths(run).deciles == []
