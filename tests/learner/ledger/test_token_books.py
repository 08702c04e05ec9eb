"""What became of generated tokens, by ledger and books: each is counted once, whatever happened to its sample."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from learner.disk.run_folder import TOKENS
from learner.disk.token_books import TABLES, TOTALS, UNBOOKED, TokenBooks
from learner.ledger.ledger import Ledger
from protocol.wire import messages as m
from tests.protocol.wire.examples import example_facts

# Model tokens of the example's facts.
_OWN = 3


class BookedLedger(Ledger):
    """A ledger with its books."""

    books: TokenBooks


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[BookedLedger]:
    with opened(tmp_path) as ledger:
        ledger.lease("e0-a", 0, "a", 0, "s1", 1)
        yield ledger


@contextmanager
def opened(folder: Path) -> Iterator[BookedLedger]:
    with closing(BookedLedger(folder / "ledger.sqlite")) as ledger:
        ledger.books = TokenBooks(ledger.attach(TOKENS, "books", TABLES))
        yield ledger


def tell(ledger: BookedLedger, *rows: m.TokenCount, session: str = "s1-1-x", incarnation: int = 1) -> None:
    total = sum(row.num_tokens for row in rows)
    message = m.TokensCounted(
        run_id="r1", incarnation=incarnation, session=session, num_generated=total, rows=list(rows)
    )
    ledger.books.receive("s1", message)


def finish(ledger: BookedLedger, **changes: Any) -> None:
    facts = {"group": "e0-a", "sample_index": 0, "attempt": 1, "incarnation": 1, "kind": "train"}
    ledger.add_trajectory(example_facts(**{**facts, **changes}))


def totals(ledger: BookedLedger) -> dict[str, int]:
    return dict(ledger._db.execute(TOTALS).fetchall())


def count(num_tokens: int, how: Any = "done", attempt: int = 1, **more: Any) -> m.TokenCount:
    row = {"group": "e0-a", "sample_index": 0, "incarnation": 1, **more}
    return m.TokenCount(attempt=attempt, num_tokens=num_tokens, how=how, **row)


def test_trained_tokens_are_those_of_the_trajectory_and_the_rest_was_not_used(ledger: BookedLedger) -> None:
    tell(ledger, count(5))
    finish(ledger)
    assert totals(ledger) == {"under way": _OWN, "unused": 2}
    ledger.mark_trained(["e0-a"], 1, 3)
    assert totals(ledger) == {"trained": _OWN, "unused": 2}


def test_repeated_and_late_counts_change_nothing(ledger: BookedLedger) -> None:
    tell(ledger, count(4, ""))
    tell(ledger, count(9, "failed"))
    tell(ledger, count(4, ""))
    tell(ledger, count(9, "failed"))
    assert totals(ledger) == {"failed": 9}


@pytest.mark.parametrize(
    ("how", "what"), [("", "under way"), ("failed", "failed"), ("stopped", "aborted"), ("died", "died")]
)
def test_tokens_without_a_trajectory_go_by_how_the_attempt_ended(ledger: BookedLedger, how: str, what: str) -> None:
    tell(ledger, count(7, how), m.TokenCount("-", 0, 1, 0, 2, "stopped"))
    assert totals(ledger) == {what: 7, "probes": 2}


@pytest.mark.parametrize("reason", ["stale", "filtered", "rejected", "failed", "lineage"])
def test_trajectory_that_is_not_trained_goes_by_the_coordinators_reason(ledger: BookedLedger, reason: str) -> None:
    tell(ledger, count(_OWN))
    ledger.books.note_unused(example_facts(group="e0-a", sample_index=0, attempt=1, incarnation=1), "unknown")
    ledger.books.note_unused(example_facts(group="e0-a", sample_index=0, attempt=1, incarnation=1), reason)
    ledger.books.note_unused(example_facts(group="e0-a", sample_index=0, attempt=1, incarnation=1), "unknown")
    assert totals(ledger) == {reason: _OWN}


def test_prompt_that_is_skipped_after_its_samples_came_back_keeps_the_reason(ledger: BookedLedger) -> None:
    tell(ledger, count(_OWN))
    finish(ledger)
    ledger.set_state(["e0-a"], "skipped", 1, "step not applied: loss is nan")
    assert totals(ledger) == {"skipped": _OWN}
    ledger.books.note_unused(example_facts(group="e0-a", sample_index=0, attempt=1, incarnation=1), "filtered")
    assert totals(ledger) == {"filtered": _OWN}


def test_tokens_of_a_lost_count_are_uncounted_until_it_comes_again(ledger: BookedLedger) -> None:
    """The second message says 9 tokens in all, and the first one, with 4 of them, was lost."""
    newer = count(5, "failed", sample_index=1)
    stamp: dict[str, Any] = {"run_id": "r1", "incarnation": 1, "session": "s1-1-x", "num_generated": 9}
    ledger.books.receive("s1", m.TokensCounted(**stamp, rows=[newer]))
    assert totals(ledger) == {"failed": 5, "uncounted": 4}
    ledger.books.receive("s1", m.TokensCounted(**stamp, rows=[count(4, "failed")]))
    assert totals(ledger) == {"failed": 9}


@pytest.mark.parametrize("killed", [0, 2, 9])
def test_attempt_that_two_sessions_began_is_used_once(killed: int, ledger: BookedLedger) -> None:
    """A lease came twice: to a server that was killed, and to its next process."""
    kept = count(2, "failed", num_resumed=0)
    resumed = {"attempt": 2, "num_resumed": 2, "resumed_from": 1}
    tell(ledger, kept, count(killed, "died", **resumed))
    tell(ledger, count(1, **resumed), session="s1-1-y")
    finish(ledger, attempt=2)
    ledger.mark_trained(["e0-a"], 1, 3)
    assert totals(ledger) == {"trained": _OWN} | ({"died": killed} if killed else {})
    assert ledger._db.execute(UNBOOKED).fetchall() == []


def test_evaluated_tokens_are_no_waste(ledger: BookedLedger) -> None:
    tell(ledger, count(_OWN, group="eval-0-h"))
    finish(ledger, group="eval-0-h", kind="eval")
    assert totals(ledger) == {"evaluation": _OWN}


def test_kept_turns_count_once_for_the_attempt_that_generated_them(ledger: BookedLedger) -> None:
    """Attempt 1 kept 1 of its 6 tokens; 2 began from it and kept nothing; 3 began from it and added 2."""
    tell(ledger, count(6, "died"), count(4, "died", 2, num_resumed=1, resumed_from=1), session="s1-1-a")
    tell(ledger, count(2, "done", 3, num_resumed=1, resumed_from=1), session="s2-1-b")
    finish(ledger, attempt=3)
    ledger.mark_trained(["e0-a"], 1, 3)
    assert totals(ledger) == {"trained": 3, "died": 9}
    assert ledger._db.execute(UNBOOKED).fetchall() == []


def test_kept_turns_of_a_sample_that_is_not_trained_go_by_its_reason(ledger: BookedLedger) -> None:
    """Attempt 1 kept 1 of its 6 tokens, 2 added 2; the coordinator gives its reason for attempt 2."""
    tell(ledger, count(6, "died"), session="s1-1-a")
    tell(ledger, count(2, "done", 2, num_resumed=1, resumed_from=1), session="s2-1-b")
    finish(ledger, attempt=2)
    ledger.set_state(["e0-a"], "skipped", reason="all rewards are 1")
    ledger.books.note_unused(example_facts(group="e0-a", sample_index=0, attempt=2, incarnation=1), "filtered")
    assert totals(ledger) == {"filtered": 3, "died": 5}


def test_step_that_is_redone_after_a_crash_moves_its_tokens_and_counts_them_once(ledger: BookedLedger) -> None:
    tell(ledger, count(_OWN))
    tell(ledger, count(_OWN, incarnation=2), session="s1-2-y", incarnation=2)
    finish(ledger, incarnation=2)
    ledger.mark_trained(["e0-a"], 1, 3)
    assert totals(ledger) == {"trained": _OWN, "redone": _OWN}
    # The server still had the first start's result, and that is what the second start trained.
    finish(ledger, incarnation=1)
    ledger.mark_trained(["e0-a"], 1, 3)
    assert totals(ledger) == {"trained": _OWN, "under way": _OWN}


def test_books_stay_when_the_ledger_goes_back(tmp_path: Path) -> None:
    with opened(tmp_path) as ledger:
        ledger.begin_copy(tmp_path / "copy.sqlite").make()
        tell(ledger, count(8, "stopped"))
        ledger.commit()
    for path in tmp_path.glob("ledger.sqlite*"):
        path.unlink()
    (tmp_path / "copy.sqlite").rename(tmp_path / "ledger.sqlite")
    with opened(tmp_path) as ledger:
        assert totals(ledger) == {"aborted": 8}


def test_ledger_of_a_version_without_books_begins_them(tmp_path: Path) -> None:
    with opened(tmp_path) as ledger:
        ledger.lease("e0-a", 0, "a", 0, "s1", 1)
        finish(ledger)
        ledger.mark_trained(["e0-a"], 1, 3)
    for path in tmp_path.glob("tokens.sqlite*"):
        path.unlink()
    with opened(tmp_path) as ledger:
        tell(ledger, count(4, "", group="e0-b", incarnation=2), session="s1-2-y", incarnation=2)
        assert totals(ledger) == {"under way": 4}
        assert ledger._db.execute(UNBOOKED).fetchall() == []
