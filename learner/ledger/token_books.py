"""The writer of the token books. They are committed with the ledger, and stay when the ledger goes back.

Rollout servers send totals, so a repeated message changes nothing.
"""

import sqlite3
from collections.abc import Callable
from pathlib import Path

from learner.disk.token_books import TABLES
from protocol.wire.messages import TokensCounted
from protocol.wire.trajectory import TrajectoryFacts


class TokenBooks:
    """The writer, in the ledger's transaction."""

    def __init__(self, db: sqlite3.Connection, path: Path, change: Callable[[str, tuple[object, ...]], None]) -> None:
        """db: the ledger's connection. change: makes a change in its transaction. Raises: sqlite3.Error."""
        db.execute("ATTACH ? AS books", (str(path),))
        db.execute("PRAGMA books.journal_mode=WAL")
        db.execute("PRAGMA books.synchronous=NORMAL")
        db.executescript(TABLES)
        self._change = change

    def receive(self, server: str, message: TokensCounted) -> None:
        """Record the counts of a server's session."""
        self._change(
            "INSERT INTO books.sessions VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
            "num_generated = MAX(num_generated, excluded.num_generated)",
            (message.session, server, message.incarnation, message.num_generated),
        )
        for row in message.rows:
            self._change(
                "INSERT INTO books.attempts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, NULL) ON CONFLICT DO UPDATE SET "
                "num_tokens = MAX(num_tokens, excluded.num_tokens), how = IIF(excluded.how = '', how, excluded.how)",
                (
                    row.group, row.sample_index, row.incarnation, row.attempt, message.session, row.num_tokens,
                    row.how, row.num_resumed, row.resumed_from,
                ),
            )  # fmt: skip

    def note_unused(self, facts: TrajectoryFacts, reason: str) -> None:
        """Record why a trajectory was not trained. Another start may train it nevertheless."""
        self._change(
            'UPDATE books.attempts SET reason = ? WHERE "group" = ? AND sample_index = ? AND incarnation = ? '
            "AND attempt = ? AND COALESCE(reason, 'unknown') IN ('duplicate', 'unknown')",
            (reason, facts.group, facts.sample_index, facts.incarnation, facts.attempt),
        )
