"""Runs whose accounts were broken on purpose, and what the audit says of them."""

import sqlite3
from contextlib import closing
from pathlib import Path

from learner.audit.report import audit_run_folder

# A run's groups by position, as in audited_run: steps 1 and 2 trained 0-3, 4 was given up, step 3 was not applied to 5
# and 6, step 4 trained 7 and 8; 9 and 10 are out.
Good = tuple[Path, list[str]]


def break_ledger(path: Path, groups: list[str], *statements: str) -> None:
    """Run SQL in which {3} stands for the group at position 3."""
    with closing(sqlite3.connect(path)) as db:
        for statement in statements:
            db.execute(statement.format(*groups))
        db.commit()


def lines_of(folder: Path, rule: str) -> list[str]:
    """Return the audit's lines on one rule."""
    breaches = audit_run_folder(folder).breaches
    return [str(breach) for breach in breaches.shown if breach.rule == rule]
