"""The token books of a run folder: the tokens that were generated for each attempt, and what became of them.

`tokens.sqlite` is attached to the ledger's connection as "books", and committed with it. What became of the tokens is
not written: `FATES` finds it in the ledger, so that a step that is redone after a crash moves its tokens by itself.
"""

import sqlite3
from collections.abc import Callable
from pathlib import Path

from protocol.wire.messages import TokensCounted
from protocol.wire.trajectory import TrajectoryFacts

TABLES = """
CREATE TABLE IF NOT EXISTS books.sessions (
    session TEXT PRIMARY KEY, server TEXT NOT NULL, incarnation INTEGER NOT NULL, num_generated INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS books.attempts (
    "group" TEXT NOT NULL, sample_index INTEGER NOT NULL, incarnation INTEGER NOT NULL, attempt INTEGER NOT NULL,
    session TEXT NOT NULL, num_tokens INTEGER NOT NULL, how TEXT NOT NULL, num_resumed INTEGER NOT NULL,
    resumed_from INTEGER NOT NULL, reason TEXT,
    PRIMARY KEY ("group", sample_index, incarnation, attempt, session)) WITHOUT ROWID;
"""

# A lease that came twice, to a killed server and to its next process, has two rows of one attempt, of which one
# is the trajectory's.
_IS_OWN = """NOT EXISTS (SELECT 1 FROM books.attempts AS o WHERE o."group" = a."group"
    AND o.sample_index = a.sample_index AND o.incarnation = a.incarnation AND o.attempt = a.attempt
    AND (o.how = 'done', o.num_tokens, o.session) > (a.how = 'done', a.num_tokens, a.session))"""
_KEY = '"group", sample_index, incarnation, attempt'

# Tables `used` (tokens of an attempt that are in a trajectory: those from num_resumed up to `upto`) and `fates` (each
# attempt's tokens in two parts; last those whose count was lost on the way, until it is sent again). A trajectory may
# continue the kept turns of earlier attempts, and these of others.
FATES = f"""
WITH RECURSIVE used({_KEY}, upto, what) AS (
    SELECT {_KEY}, num_model_tokens,
        CASE WHEN kind = 'eval' THEN 'evaluation' WHEN step IS NOT NULL THEN 'trained' ELSE 'under way' END
    FROM trajectories
    UNION ALL
    SELECT u."group", u.sample_index, u.incarnation, a.resumed_from, a.num_resumed, u.what
    FROM used AS u JOIN books.attempts AS a USING ({_KEY})
    WHERE a.num_resumed > 0 AND a.resumed_from < a.attempt AND {_IS_OWN}
), parts AS (
    SELECT a.*, u.what, COALESCE(u.upto - a.num_resumed, 0) AS num_used, p.state
    FROM books.attempts AS a LEFT JOIN used AS u ON (u."group", u.sample_index, u.incarnation, u.attempt)
        = (a."group", a.sample_index, a.incarnation, a.attempt) AND {_IS_OWN}
    LEFT JOIN prompts AS p ON p."group" = a."group"
), fates(what, num_tokens) AS (
    SELECT IIF(what = 'under way' AND state = 'skipped', COALESCE(reason, (
        SELECT o.reason FROM books.attempts AS o
        WHERE (o."group", o.sample_index, o.incarnation) = (parts."group", parts.sample_index, parts.incarnation)
        AND o.reason NOT IN ('duplicate', 'unknown')
    ), 'skipped'), what), num_used
    FROM parts WHERE what IS NOT NULL
    UNION ALL
    SELECT CASE
        WHEN "group" = '-' THEN 'probes'
        WHEN reason IS NOT NULL AND what IS NULL THEN reason
        WHEN how = '' THEN 'under way'
        WHEN how = 'done' AND what IS NOT NULL THEN 'unused'
        WHEN how = 'done' THEN IIF(incarnation < (SELECT MAX(incarnation) FROM books.sessions), 'redone', 'under way')
        WHEN how = 'stopped' THEN 'aborted'
        ELSE how END, num_tokens - num_used
    FROM parts WHERE num_tokens != num_used
    UNION ALL
    SELECT 'uncounted', lacking FROM (SELECT (SELECT COALESCE(SUM(num_generated), 0) FROM books.sessions)
        - (SELECT COALESCE(SUM(num_tokens), 0) FROM books.attempts) AS lacking) WHERE lacking > 0
)
"""  # noqa: S608
TOTALS = f"{FATES} SELECT what, SUM(num_tokens) FROM fates GROUP BY what ORDER BY what != 'trained', 2 DESC, 1"  # noqa: S608

# Attempts with more tokens in a trajectory than were generated for them, since the run has books.
UNBOOKED = f"""
{FATES} SELECT u."group", u.sample_index, u.attempt, u.upto - COALESCE(a.num_resumed, 0) AS num_used,
    COALESCE(a.num_tokens, 0) AS num_tokens
FROM used AS u LEFT JOIN books.attempts AS a ON (u."group", u.sample_index, u.incarnation, u.attempt)
    = (a."group", a.sample_index, a.incarnation, a.attempt) AND {_IS_OWN}
WHERE u.incarnation >= (SELECT MIN(incarnation) FROM books.sessions) AND num_used > COALESCE(a.num_tokens, 0)
ORDER BY 1, 2
"""  # noqa: S608


class TokenBooks:
    """The writer. Rollout servers send totals, so a repeated message changes nothing."""

    def __init__(self, change: Callable[[str, tuple[object, ...]], None]) -> None:
        """change: makes a change of the attached books in the ledger's transaction: `Ledger.attach`."""
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


def attach_books(db: sqlite3.Connection, path: Path, uri: Callable[[Path], str]) -> None:
    """Attach the books to a connection that reads their ledger; empty ones where a run has none.

    uri: SQLite's address of a file that is only read.
    """
    if path.exists():
        db.execute("ATTACH ? AS books", (uri(path),))
    else:
        db.execute("ATTACH ':memory:' AS books")
        db.executescript(TABLES)
