"""Counts of generated tokens at the coordinator, and the reason of each trajectory that is not trained."""

import sqlite3
from contextlib import closing
from typing import Any

from protocol.wire import messages as m
from tests.learner.coordinator.coordinator_script import Script


def tell(script: Script, row: m.TokenCount) -> None:
    counted = m.TokensCounted(**script.stamp, request=5, session="s1-1-x", num_generated=row.num_tokens, rows=[row])
    script.tell("s1", counted)


def attempts(script: Script) -> list[tuple[Any, ...]]:
    script.advance()
    with closing(sqlite3.connect(script.folder / "tokens.sqlite")) as db:
        return db.execute("SELECT session, num_tokens, how, reason FROM attempts").fetchall()


def test_counts_are_answered_each_time_and_go_into_the_books_once(script: Script) -> None:
    for _ in range(2):
        tell(script, m.TokenCount("e0-p0", 0, 1, 1, 12, "done"))
    assert [message.request for message in script.take("s1", m.Done)] == [5, 5]
    assert attempts(script) == [("s1-1-x", 12, "done", None)]


def test_books_know_why_a_trajectory_was_not_trained(script: Script) -> None:
    lease, *_ = script.demand()
    tell(script, m.TokenCount(lease.group, 0, lease.incarnation, 1, 3, "done"))
    script.tell(
        "s1",
        m.SampleFailed(**script.stamp, group=lease.group, sample_index=0, attempt=1, boundary="engine", detail="x"),
    )
    assert attempts(script) == [("s1-1-x", 3, "done", None)]
    script.take("s1", m.Ack)
    first = script.trajectory("s1", lease, 1)
    assert script.send_trajectory("s1", first).outcome == "accepted"
    tell(script, m.TokenCount(lease.group, 1, lease.incarnation, 1, 3, "done"))
    assert script.send_trajectory("s1", first).outcome == "duplicate"
    assert attempts(script)[1] == ("s1-1-x", 3, "done", "duplicate")
