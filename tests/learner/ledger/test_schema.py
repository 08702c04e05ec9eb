"""Ledgers of other versions: an older one opens with everything in it, a newer one is refused."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from learner.ledger.ledger import LeasedPrompt, Ledger
from protocol.errors import OperatorError

# A ledger of schema 1: three rows as the first version of the program wrote them.
_SCHEMA_1 = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE prompts (
    "group" TEXT PRIMARY KEY, epoch INTEGER NOT NULL, uid TEXT NOT NULL, position INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('pending', 'leased', 'ready', 'assigned', 'trained', 'skipped')),
    server TEXT, attempt INTEGER NOT NULL, step INTEGER, reason TEXT, changed_at REAL NOT NULL);
CREATE INDEX prompts_by_state ON prompts (state);
CREATE TABLE trajectories (
    "group" TEXT NOT NULL, sample_index INTEGER NOT NULL, attempt INTEGER NOT NULL, incarnation INTEGER NOT NULL,
    kind TEXT NOT NULL, is_greedy INTEGER NOT NULL, server TEXT NOT NULL, reward REAL NOT NULL,
    reward_parts TEXT NOT NULL, num_tokens INTEGER NOT NULL, num_model_tokens INTEGER NOT NULL,
    num_turns INTEGER NOT NULL, finish TEXT NOT NULL,
    oldest_version INTEGER NOT NULL, newest_version INTEGER NOT NULL, step INTEGER, staleness INTEGER,
    started_at REAL NOT NULL, finished_at REAL NOT NULL, received_at REAL NOT NULL,
    PRIMARY KEY ("group", sample_index));
CREATE TABLE events (at REAL NOT NULL, kind TEXT NOT NULL, detail TEXT NOT NULL);
INSERT INTO meta VALUES ('incarnation', '4');
INSERT INTO prompts VALUES ('e0-a', 0, 'a', 0, 'trained', 's1', 1, 1, NULL, 0), ('e0-b', 0, 'b', 1, 'leased', 's1', 2, NULL, NULL, 0);
"""  # noqa: E501


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


def names(path: Path, kind: str) -> set[str]:
    with closing(sqlite3.connect(path)) as db:
        found = db.execute("SELECT name FROM sqlite_master WHERE type = ? AND name NOT LIKE 'sqlite_%'", (kind,))
        return {name for (name,) in found}


def test_ledger_of_schema_1_opens_with_what_it_holds(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.executescript(_SCHEMA_1)
    with closing(Ledger(path)) as ledger:
        assert ledger.begin_incarnation(policy_version=1) == 5
        assert ledger.last_shared_version(4) is None
        assert ledger.recall_unfinished() == [LeasedPrompt("e0-b", 0, "b", 1, 2)]
        ledger.add_failure("e0-b", 0, 2, "s1", "server", "s1 died")
        assert ledger.meta("schema") == "5"


def test_ledger_of_schema_1_has_the_same_tables_and_indexes_as_a_new_one_when_it_was_opened(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.executescript(_SCHEMA_1)
    Ledger(path).close()
    new = path.with_name("new.sqlite")
    Ledger(new).close()
    for kind in ("table", "index"):
        assert names(path, kind) == names(new, kind)


@pytest.mark.parametrize(
    ("endpoints", "source"),
    [
        (
            '{"name": "em", "url": "http://h/em", "weight": 2.0, "shadow": false}, '
            '{"name": "f1", "url": "http://h/f1", "weight": 1.0, "shadow": true}',
            "em http://h/em weight 2; sum",
        ),
        ('{"name": "em", "url": "http://h/em", "weight": 0.0, "shadow": false}', "the environment alone; sum"),
        ("", "the service of the cluster; sum"),
    ],
)
def test_ledger_of_schema_4_keeps_of_its_numbered_endpoints_the_newest(path: Path, endpoints: str, source: str) -> None:
    scoring = f'{{"combine": "sum", "endpoints": [{endpoints}]}}'
    with closing(sqlite3.connect(path)) as db:
        db.executescript(_SCHEMA_1)
        db.execute("ALTER TABLE trajectories ADD COLUMN reward_set INTEGER NOT NULL DEFAULT 1")
        db.execute("CREATE TABLE reward_sets (number INTEGER PRIMARY KEY, since REAL NOT NULL, scoring TEXT NOT NULL)")
        db.execute("INSERT INTO reward_sets VALUES (1, 0, '{}'), (2, 0, ?)", (scoring,))
        db.execute("INSERT INTO meta VALUES ('schema', '4')")
        db.commit()
    with closing(Ledger(path)) as ledger:
        assert ledger.begin_rewards(source, "", 1, 1) is None
    new = path.with_name("new.sqlite")
    Ledger(new).close()
    assert names(path, "table") == names(new, "table")


def test_ledger_is_refused_when_a_newer_version_wrote_it(path: Path) -> None:
    with closing(Ledger(path)) as ledger:
        ledger.set_meta("schema", "6")
    with pytest.raises(OperatorError) as caught:
        Ledger(path)
    assert str(caught.value) == (
        f"The ledger {path} has schema 6, this version of Sluice knows 5. Use the version of Sluice that wrote it."
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
