"""The audit's rule on reward sets, each way that a ledger may break it; an older ledger knows of none."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from learner.audit.reward_sets import check_reward_sets, note_reward_sets
from learner.audit.run import AuditedRun
from learner.ledger.ledger import Ledger
from protocol.settings.settings import Settings
from tests.protocol.wire.examples import example_facts


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    """Two groups of two, trained: one scored by set 1, one by set 2."""
    with closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        for number in (1, 2):
            ledger.add_reward_set(number, 100.0, "{}")
            group = f"e0-{number}"
            ledger.lease(group, 0, f"uid{number}", number, "s1", 1)
            for index in (0, 1):
                ledger.add_trajectory(example_facts(group=group, sample_index=index, reward_set=number), 1)
            ledger.mark_trained([group], number, 4)
        yield ledger


def audited(ledger: Ledger, folder: Path, change: str = "") -> tuple[list[str], list[str]]:
    """Return (breaches, notes) after this change of the ledger."""
    ledger.commit()
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as db:
        db.executescript(change)
        run = AuditedRun(folder, Settings(), [], db, b"", [])
        return [str(breach) for breach in check_reward_sets(run)], note_reward_sets(run)


def test_groups_of_one_set_each_break_nothing_and_are_counted(ledger: Ledger, tmp_path: Path) -> None:
    note = "Trained trajectories by reward set: set 1: 2, set 2: 2."
    assert audited(ledger, tmp_path) == ([], [note])


def test_a_group_that_two_sets_scored_breaks_the_rule(ledger: Ledger, tmp_path: Path) -> None:
    breaches, _ = audited(
        ledger, tmp_path, "UPDATE trajectories SET reward_set = 1 WHERE \"group\" = 'e0-2' AND sample_index = 0"
    )
    assert breaches == [
        "ledger.sqlite, group e0-2, step 2: its samples were scored by the reward sets 1 to 2, expected one set"
    ]


def test_a_set_that_is_nowhere_recorded_breaks_the_rule(ledger: Ledger, tmp_path: Path) -> None:
    breaches, _ = audited(ledger, tmp_path, "DELETE FROM reward_sets WHERE number = 2")
    assert breaches == ["ledger.sqlite, group e0-2: was scored by reward set 2, as 1 others; no such set is recorded"]


def test_a_ledger_that_knows_no_sets_breaks_nothing(ledger: Ledger, tmp_path: Path) -> None:
    change = "DROP TABLE reward_sets; ALTER TABLE trajectories DROP COLUMN reward_set"
    assert audited(ledger, tmp_path, change) == ([], [])
