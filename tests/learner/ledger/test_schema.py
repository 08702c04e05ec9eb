"""Ledgers of other versions are refused, and a ledger's queries use its indexes."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from learner.ledger.ledger import Ledger
from protocol.errors import OperatorError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


@pytest.mark.parametrize(("schema", "writer"), [(6, "the version of Sluice that wrote it"), (4, "Sluice 0.1.0")])
def test_ledger_of_another_version_is_refused(path: Path, schema: int, writer: str) -> None:
    with closing(Ledger(path)) as ledger:
        ledger.set_meta("schema", str(schema))
    with pytest.raises(OperatorError) as caught:
        Ledger(path)
    assert str(caught.value) == (
        f"The ledger {path} has schema {schema}, this version of Sluice knows 5. Use {writer}."
    )


@pytest.mark.parametrize(
    "query",
    [
        "SELECT \"group\" FROM prompts WHERE state NOT IN ('trained', 'skipped') ORDER BY position",
        "UPDATE prompts SET state = 'pending' WHERE state NOT IN ('trained', 'skipped') AND state != 'pending'",
        "SELECT detail FROM failures WHERE \"group\" = 'g' ORDER BY rowid",
    ],
)
def test_recovery_looks_at_no_prompt_that_is_accounted_for(path: Path, query: str) -> None:
    Ledger(path).close()
    with closing(sqlite3.connect(path)) as db:
        plan = [row[3] for row in db.execute(f"EXPLAIN QUERY PLAN {query}")]
    assert all("INDEX prompts_unfinished" in line or "INDEX failures_by_group" in line for line in plan), plan
