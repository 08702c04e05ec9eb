"""The ledger: states of prompts, facts of trajectories, recovery, and copies that open anywhere."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from learner.ledger.ledger import LeasedPrompt, Ledger
from protocol.errors import OperatorError
from tests.protocol.wire.examples import example_facts


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


def rows(path: Path, query: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(path)) as db:
        return db.execute(query).fetchall()


def lease_all(ledger: Ledger, *groups: str) -> None:
    for position, group in enumerate(groups):
        ledger.lease(group, epoch=0, uid=f"uid-{group}", position=position, server="s1", attempt=1)


def test_incarnation_is_not_given_twice_when_an_older_ledger_is_put_back(path: Path) -> None:
    with closing(Ledger(path)) as ledger:
        assert ledger.begin_incarnation(policy_version=0) == 1
        ledger.begin_copy(path.with_name("checkpoint.sqlite")).make()
    for expected in (2, 3):
        path.write_bytes(path.with_name("checkpoint.sqlite").read_bytes())
        ledger = Ledger(path)
        assert ledger.begin_incarnation(policy_version=0) == expected
        ledger.close()


def test_ledger_records_each_state_of_a_prompt(path: Path) -> None:
    states = [
        ("ready", None, None),
        ("assigned", 3, None),
        ("pending", None, "lease expired"),
        ("skipped", None, "failed three times"),
    ]
    seen = []
    with closing(Ledger(path)) as ledger:
        lease_all(ledger, "g")
        for state, step, reason in states:
            ledger.set_state(["g"], state, step, reason)
            ledger.commit()
            seen += rows(path, "SELECT state, step, reason FROM prompts")
    assert seen == states


def test_ledger_refuses_a_state_that_does_not_exist(path: Path) -> None:
    with closing(Ledger(path)) as ledger:
        lease_all(ledger, "g")
        with pytest.raises(sqlite3.IntegrityError, match="CHECK constraint failed"):
            ledger.set_state(["g"], "lost")


def test_a_second_lease_changes_server_and_attempt_only(path: Path) -> None:
    ledger = Ledger(path)
    lease_all(ledger, "g")
    ledger.lease("g", epoch=0, uid="uid-g", position=0, server="s2", attempt=2)
    ledger.close()
    assert rows(path, 'SELECT "group", epoch, uid, position, state, server, attempt FROM prompts') == [
        ("g", 0, "uid-g", 0, "leased", "s2", 2)
    ]


def test_mark_trained_writes_step_and_staleness(path: Path) -> None:
    ledger = Ledger(path)
    lease_all(ledger, "e0-aa")
    ledger.add_trajectory(example_facts())
    ledger.mark_trained(["e0-aa"], step=6, policy_version=5)
    ledger.close()
    assert rows(path, "SELECT state, step FROM prompts") == [("trained", 6)]
    assert rows(
        path,
        "SELECT sample_index, attempt, incarnation, server, reward, reward_parts, num_tokens, num_model_tokens, "
        "num_turns, finish, oldest_version, newest_version, step, staleness FROM trajectories",
    ) == [(1, 1, 2, "s1", 0.5, '{"exact_match": 0.5}', 6, 3, 2, "answer", 3, 4, 6, 2)]


def test_recall_returns_what_was_out_oldest_first_and_makes_it_pending(path: Path) -> None:
    ledger = Ledger(path)
    lease_all(ledger, "trained", "ready", "leased", "assigned", "skipped", "pending")
    for state in ("trained", "ready", "assigned", "skipped", "pending"):
        ledger.set_state([state], state)
    unfinished = ledger.recall_unfinished()
    ledger.close()
    assert unfinished == [
        LeasedPrompt(name, 0, f"uid-{name}", position, 1)
        for name, position in (("ready", 1), ("leased", 2), ("assigned", 3), ("pending", 5))
    ]
    states = dict(rows(path, 'SELECT "group", state FROM prompts'))
    assert [name for name, state in states.items() if state == "pending"] == ["ready", "leased", "assigned", "pending"]
    assert (states["trained"], states["skipped"]) == ("trained", "skipped")


@pytest.mark.parametrize(
    ("name", "problem"), [("gone/ledger.sqlite", "unable to open database file"), ("noise", "file is not a database")]
)
def test_ledger_says_when_it_cannot_be_opened(tmp_path: Path, name: str, problem: str) -> None:
    (tmp_path / "noise").write_bytes(b"no database" * 100)
    with pytest.raises(OperatorError) as caught:
        Ledger(tmp_path / name)
    expected = f"The ledger {tmp_path / name} cannot be opened: {problem}. Check the disk and the folder."
    assert str(caught.value) == expected


def test_ledger_says_when_it_cannot_be_written(path: Path) -> None:
    ledger = Ledger(path)
    ledger._db.execute("PRAGMA max_page_count = 1")
    with pytest.raises(OperatorError) as caught:
        ledger.add_event("filler", "x" * 1_000_000)
    assert str(caught.value) == (
        f"The ledger {path} cannot be written: database or disk is full. Free the disk, then run again."
    )
    ledger._db.close()


def test_last_shared_version_is_the_oldest_start_after_an_incarnation(path: Path) -> None:
    with closing(Ledger(path)) as ledger:
        for policy_version in (0, 20, 15, 40):
            ledger.begin_incarnation(policy_version)
        assert [ledger.last_shared_version(incarnation) for incarnation in range(1, 5)] == [15, 15, 40, None]


def test_start_that_a_restored_ledger_does_not_know_shares_what_its_parent_had_then(path: Path) -> None:
    ledger = Ledger(path)
    ledger.begin_incarnation(0)
    ledger.begin_copy(path.with_name("checkpoint.sqlite")).make()
    for from_version in (3, 20):  # the first dies without a checkpoint of its own
        ledger.begin_incarnation(from_version)
        ledger.close()
        path.write_bytes(path.with_name("checkpoint.sqlite").read_bytes())
        ledger = Ledger(path)
    assert ledger.begin_incarnation(30) == 4
    assert [ledger.last_shared_version(incarnation) for incarnation in range(1, 6)] == [30, 3, 20, None, None]
    ledger.close()
    assert rows(path, "SELECT number, policy_version FROM incarnations") == [(1, 0), (4, 30)]


def test_start_without_a_checkpoint_shares_nothing_with_the_one_before(path: Path) -> None:
    with closing(Ledger(path)) as ledger:
        ledger.begin_incarnation(0)
    path.unlink()  # a start without a checkpoint sets it aside
    with closing(Ledger(path)) as ledger:
        assert ledger.begin_incarnation(0) == 2
        assert ledger.last_shared_version(1) is None


def test_recall_returns_failures_by_sample_in_order(path: Path) -> None:
    ledger = Ledger(path)
    lease_all(ledger, "out", "trained")
    ledger.add_failure("out", 1, 1, "s1", "reward:em", "HTTP 500")
    ledger.add_failure("out", 0, 1, "s1", "server", "s1 died")
    ledger.add_failure("out", 1, 2, "s2", "retriever", "timeout")
    ledger.add_failure("trained", 0, 1, "s1", "server", "s1 died")
    ledger.set_state(["trained"], "trained", 1)
    ledger.close()
    with closing(Ledger(path)) as ledger:
        (recalled,) = ledger.recall_unfinished()
    assert recalled.failures == {
        0: [("server", "s1 died")],
        1: [("reward:em", "HTTP 500"), ("retriever", "timeout")],
    }


def test_recall_counts_what_it_forgets_as_wasted_by_the_restart(path: Path) -> None:
    ledger = Ledger(path)
    lease_all(ledger, "unused", "used", "given-up")
    ledger.set_state(["unused"], "assigned", 7)
    for group in ("unused", "used", "given-up"):
        ledger.add_trajectory(example_facts(group=group))
    ledger.add_trajectory(example_facts(group="eval-0-h", kind="eval"))
    ledger.mark_trained(["used"], step=1, policy_version=4)
    ledger.set_state(["given-up"], "skipped", reason="failed three times")
    ledger.recall_unfinished()
    ledger.close()
    assert rows(path, 'SELECT "group", sample_index, attempt, reason, num_tokens FROM waste') == [
        ("unused", 1, 1, "restart", 3)
    ]
    assert rows(path, 'SELECT "group" FROM trajectories ORDER BY 1') == [("eval-0-h",), ("given-up",), ("used",)]
    assert rows(path, "SELECT state, step FROM prompts WHERE \"group\" = 'unused'") == [("pending", None)]


def test_claim_returns_what_was_claimed_first_when_it_differs(path: Path) -> None:
    with closing(Ledger(path)) as ledger:
        assert ledger.claim("seed", "1") is None
    with closing(Ledger(path)) as ledger:
        assert [ledger.claim("seed", value) for value in ("1", "2", "1")] == [None, "1", None]
        assert ledger.claim("data", "2") is None
    assert rows(path, "SELECT key, value FROM meta WHERE key LIKE 'claim:%' ORDER BY 1") == [
        ("claim:data", "2"),
        ("claim:seed", "1"),
    ]


def test_terms_of_a_step_can_be_changed_until_it_is_taken(path: Path) -> None:
    ledger = Ledger(path)
    ledger.begin_terms(1, {"group_size": 4, "max_staleness": 1})
    ledger.begin_terms(8, {"group_size": 8})
    ledger.begin_terms(8, {"group_size": 16})
    ledger.close()
    assert rows(path, "SELECT from_step, name, value FROM terms ORDER BY 1, 2") == [
        (1, "group_size", 4),
        (1, "max_staleness", 1),
        (8, "group_size", 16),
    ]


def test_ledger_of_a_run_without_a_file_of_endpoints_knows_them_itself(path: Path) -> None:
    """A version that wrote no scored_by.json began the run."""
    with closing(Ledger(path)) as ledger:
        ledger.begin_rewards("em", "", 1, 1)
        for source, incarnation, since in (("em", 2, 0), ("f1", 3, 3), ("f1", 4, 3)):
            path.with_name("scored_by.json").unlink()
            ledger.begin_rewards(source, "", 1, incarnation)
            assert ledger.scored_since_start == since


@pytest.mark.parametrize(("is_failed", "num_kept"), [(False, 2), (True, 1)])
def test_ledger_of_a_failed_coordinator_is_closed_without_what_was_not_committed(
    path: Path, is_failed: bool, num_kept: int
) -> None:
    ledger = Ledger(path)
    lease_all(ledger, "a")
    ledger.commit()
    lease_all(ledger, "b")
    ledger.close(is_failed=is_failed)
    assert len(rows(path, "SELECT 1 FROM prompts")) == num_kept
