"""Every rule of the audit against one run that breaks it, made from a run whose accounts hold."""

import re
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from learner.audit.report import audit_run_folder
from learner.disk.token_books import TABLES
from learner.ledger.ledger import Ledger
from tests.learner.audit.broken_run import Good, break_ledger, lines_of


def ledger_rules() -> list[tuple[str, list[str], list[str]]]:
    """Return (rule, statements, lines of the audit) of each case in ledger_rules.txt."""
    text = Path(__file__).with_name("ledger_rules.txt").read_text(encoding="utf-8")
    cases = [case.splitlines() for case in re.split(r"\n(?=\S)", text.strip())]
    parted = [(*first.split(": ", 1), [line.strip() for line in lines]) for first, *lines in cases]
    return [(rule, statements.split("; "), lines) for rule, statements, lines in parted]


@pytest.mark.parametrize(("rule", "statements", "expected"), ledger_rules())
def test_audit_names_what_broke_in_the_ledger(
    run: Path, good: Good, rule: str, statements: list[str], expected: list[str]
) -> None:
    groups = good[1]
    shutil.rmtree(run / "checkpoints")  # their copies would tell of the change, too
    break_ledger(run / "ledger.sqlite", groups, *statements)
    earlier, later = sorted(groups[1:3])
    names = {"earlier": earlier, "later": later, "3uid": groups[3][3:]}
    expected = [_named(line, groups, names) for line in expected]
    assert lines_of(run, rule) == expected


def _named(line: str, groups: list[str], names: dict[str, str]) -> str:
    for key, name in [*names.items(), *((str(place), group) for place, group in enumerate(groups))]:
        line = line.replace(f"{{{key}}}", name)
    return line


def test_audit_measures_each_step_by_the_settings_of_its_day(run: Path, good: Good) -> None:
    settings = (run / "settings.yaml").read_text(encoding="utf-8")
    changed = settings.replace("max_staleness: 1", "max_staleness: 0").replace("group_size: 2", "group_size: 8")
    (run / "settings.yaml").write_text(changed, encoding="utf-8")
    assert audit_run_folder(run).holds
    break_ledger(
        run / "ledger.sqlite", good[1], "UPDATE terms SET value = 0 WHERE name = 'max_staleness' AND from_step = 1"
    )
    assert lines_of(run, "staleness") == [
        f"ledger.sqlite, group {group}, step 2: was trained at staleness 1, at most 0 is allowed"
        for group in sorted(good[1][2:4])
    ]


def test_audit_shows_a_hundred_lines_of_a_rule_and_counts_the_rest(run: Path, good: Good) -> None:
    shutil.rmtree(run / "checkpoints")
    break_ledger(
        run / "ledger.sqlite",
        good[1],
        "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < 249) "
        "INSERT INTO prompts SELECT 'x' || i, 0, 'x', -1, 'skipped', 's1', 1, NULL, '', 0 FROM n",
    )
    breaches = audit_run_folder(run).breaches
    assert breaches.counts == {"positions": 250, "skip_reason": 250}
    assert len(breaches.shown) == 200
    assert breaches.lines()[-2:] == [
        "and 150 more that break the rule positions",
        "and 150 more that break the rule skip_reason",
    ]


def test_audit_names_tokens_that_are_not_in_the_books(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    with closing(Ledger(run / "ledger.sqlite")) as ledger:
        ledger.attach("tokens.sqlite", "books", TABLES)
    with closing(sqlite3.connect(run / "ledger.sqlite")) as db:
        db.execute("ATTACH ? AS books", (str(run / "tokens.sqlite"),))
        db.execute(
            "INSERT INTO books.attempts "
            'SELECT "group", sample_index, incarnation, attempt, ?, num_model_tokens, ?, 0, 0, NULL FROM trajectories',
            ("s1-1-x", "done"),
        )
        (total,) = db.execute("SELECT SUM(num_tokens) FROM books.attempts").fetchone()
        db.execute("INSERT INTO books.sessions VALUES ('s1-1-x', 's1', 1, ?)", (total,))
        db.commit()
        assert lines_of(run, "token_books") == []
        (group,) = db.execute('SELECT MIN("group") FROM trajectories WHERE step = 4').fetchone()
        db.execute('UPDATE books.attempts SET num_tokens = 1 WHERE "group" = ? AND sample_index = 1', (group,))
        db.execute("UPDATE books.sessions SET num_generated = num_generated - 2")
        db.commit()
    assert lines_of(run, "token_books") == [
        f"tokens.sqlite: session s1-1-x: its server generated {total - 2} tokens, the books have {total - 1}",
        f"tokens.sqlite, group {group}: sample 1, attempt 1: its trajectory has 2 of its tokens, the books 1",
    ]
