"""What became of every prompt and trajectory, in SQLite, in the run folder.

One thread writes it; reports and audits may read it meanwhile. A prompt that was never leased has no row: the
position in the prompt order stands for all of them, so a run over a million prompts starts with an empty table.
"""

import json
import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from learner.ledger.schema import UNFINISHED, prepare_schema
from learner.ledger.snapshot import LedgerCopy
from protocol.disk.files import replace_file
from protocol.errors import OperatorError
from protocol.failpoints import failpoint
from protocol.wire.trajectory import TrajectoryFacts

# In `meta`: the JSON of a step's line of metrics that waits for an evaluation, "" when none does.
HELD_LINE = "held_line"
# What the reason of a group begins with that was skipped with its step.
NOT_APPLIED = "step not applied: "
# In `meta`: the first step, and the first start, that the present reward endpoints score; absent: all.
REWARDS_SINCE_STEP, REWARDS_SINCE_START = "rewards_since_step", "rewards_since_start"
# In `failures` of earlier versions: a death of a server that did not count against the sample any more.
_SURVIVED = "server, survived"


@dataclass(frozen=True)
class LeasedPrompt:
    """A prompt that was leased in an earlier start of the run and never trained: it goes out first."""

    group: str  # name of its group
    epoch: int  # pass over the data that it belongs to
    uid: str  # of the prompt
    position: int  # place in the prompt order
    attempt: int  # leases of the group so far
    # sample -> (boundary, detail) of each failure, in order
    failures: dict[int, list[tuple[str, str]]] = field(default_factory=dict)


class Ledger:
    """Changes are collected in one transaction until `commit`: call it once per turn of the coordinator's loop."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._incarnations = path.with_name("incarnation")
        try:
            # Opened by the process's main thread, used by the coordinator's alone, closed after that has ended.
            self._db = sqlite3.connect(path, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            prepare_schema(self._db, path)
        except sqlite3.Error as error:
            raise OperatorError(
                f"The ledger {path} cannot be opened: {error}. Check the disk and the folder."
            ) from None

    def begin_incarnation(self, policy_version: int) -> int:
        """Return how many times this run has started, this time included, and record the weights it started from.

        The count stands beside the ledger too: a resume puts a checkpoint's ledger back, whose count is that of the
        checkpoint's day, and a start after it would take the number of one whose messages may still be under way.
        """
        known = [int(self.meta("incarnation") or 0)]
        if self._incarnations.exists():
            known.append(int(self._incarnations.read_text(encoding="utf-8")))
        incarnation = max(known) + 1
        self.set_meta("incarnation", str(incarnation))
        self._change("INSERT INTO incarnations VALUES (?, ?, ?)", (incarnation, time.time(), policy_version))
        self.commit()
        # A death here gives the same number again, which no message has carried yet.
        failpoint("ledger.incarnation.committed")
        replace_file(self._incarnations, str(incarnation).encode())
        failpoint("ledger.incarnation.replaced")
        return incarnation

    def last_shared_version(self, incarnation: int) -> int | None:
        """Return the newest version that a trajectory of that earlier start may contain, None when none came after it.

        The ledger is put back with its checkpoint, so the starts in it are those of the surviving lineage. A run at
        version 23 that went on from a checkpoint of version 20 made other weights with the numbers 21 to 23 since: what
        the earlier start made with those is of weights that no longer exist, though their numbers do.
        """
        row = self._db.execute("SELECT MIN(policy_version) FROM incarnations WHERE number > ?", (incarnation,))
        version = row.fetchone()[0]
        return None if version is None else int(version)

    def begin_terms(self, from_step: int, terms: Mapping[str, int | float | str]) -> None:
        """Record the settings that steps from this one on are accounted by; a resumed run may change them.

        The audit measures every step by the terms of its day (`learner.ledger.terms`).
        """
        for name, value in terms.items():
            self._change("INSERT OR REPLACE INTO terms VALUES (?, ?, ?)", (from_step, name, value))

    def begin_rewards(self, source: str, from_step: int, incarnation: int) -> str | None:
        """Record what decides the reward from this start on; returns the earlier source if it was another one.

        source: `RewardsSettings.reward_source`. from_step: the first step of this start.
        """
        earlier = self.meta("reward_source")
        self.set_meta("reward_source", source)
        if earlier in (None, source):
            return None
        self.set_meta(REWARDS_SINCE_STEP, str(from_step))
        self.set_meta(REWARDS_SINCE_START, str(incarnation))
        self.add_event("rewards", f"{earlier} became {source}")
        return earlier

    def claim(self, key: str, value: str) -> str | None:
        """Return None when `value` is what the first start claimed under this key, else what that start claimed.

        For what must not change between the starts of a run. The first claim is recorded.
        """
        claimed = self.meta(f"claim:{key}")
        if claimed is None:
            self.set_meta(f"claim:{key}", value)
        return None if claimed in (None, value) else claimed

    def meta(self, key: str) -> str | None:
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return str(row[0]) if row else None

    def set_meta(self, key: str, value: str) -> None:
        self._change("INSERT INTO meta VALUES (?, ?) ON CONFLICT DO UPDATE SET value = excluded.value", (key, value))

    def recall_unfinished(self) -> list[LeasedPrompt]:
        """Return the prompts that were out when the run stopped, oldest first; their state becomes pending.

        Their trajectories went with the process that held the tokens: they are dropped and counted as waste.
        """
        rows = self._db.execute(
            f'SELECT "group", epoch, uid, position, attempt FROM prompts WHERE {UNFINISHED} ORDER BY position'  # noqa: S608
        ).fetchall()
        recalled = [
            LeasedPrompt(group, epoch, uid, position, attempt, self._failures_of(group))
            for group, epoch, uid, position, attempt in rows
        ]
        now = time.time()
        for prompt in recalled:
            self._change(
                "INSERT INTO waste SELECT \"group\", sample_index, attempt, 'restart', num_model_tokens, ? "
                'FROM trajectories WHERE "group" = ?',
                (now, prompt.group),
            )
            self.forget_trajectories(prompt.group)
        self._change(
            f"UPDATE prompts SET state = 'pending', step = NULL, changed_at = ? "  # noqa: S608
            f"WHERE {UNFINISHED} AND state != 'pending'",
            (now,),
        )
        self.commit()
        return recalled

    def lease(self, group: str, epoch: int, uid: str, position: int, server: str, attempt: int) -> None:
        self._change(
            "INSERT INTO prompts VALUES (?, ?, ?, ?, 'leased', ?, ?, NULL, NULL, ?) ON CONFLICT DO UPDATE SET "
            "state = 'leased', server = excluded.server, attempt = excluded.attempt, changed_at = excluded.changed_at",
            (group, epoch, uid, position, server, attempt, time.time()),
        )

    def leave_out(self, group: str, epoch: int, uid: str, position: int, reason: str) -> None:
        """Note that a prompt is not drawn in an epoch."""
        self._change(
            "INSERT INTO prompts VALUES (?, ?, ?, ?, 'skipped', NULL, 0, NULL, ?, ?) ON CONFLICT DO NOTHING",
            (group, epoch, uid, position, reason, time.time()),
        )

    def scores_of(self, group: str) -> list[tuple[float, dict[str, float]]]:
        """Return score and the reward's parts of each sample of a trained or skipped group, in the order of samples.

        A sample without a score has its reward in place of one. Samples that earlier reward endpoints scored are left
        out.
        """
        rows = self._db.execute(
            "SELECT COALESCE(t.reward_score, t.reward), t.reward_parts FROM trajectories AS t "
            'JOIN prompts AS p ON p."group" = t."group" '
            "WHERE t.\"group\" = ? AND t.kind = 'train' AND p.state IN ('trained', 'skipped') "
            "AND t.incarnation >= ? ORDER BY t.sample_index",
            (group, int(self.meta(REWARDS_SINCE_START) or 0)),
        )
        return [(float(score), json.loads(parts)) for score, parts in rows]

    def set_state(self, groups: Sequence[str], state: str, step: int | None = None, reason: str | None = None) -> None:
        now = time.time()
        for group in groups:
            self._change(
                'UPDATE prompts SET state = ?, step = ?, reason = ?, changed_at = ? WHERE "group" = ?',
                (state, step, reason, now, group),
            )

    def add_trajectory(self, facts: TrajectoryFacts) -> None:
        self._change(
            f"INSERT OR REPLACE INTO trajectories VALUES ({', '.join('?' * 21)})",  # noqa: S608
            (
                facts.group, facts.sample_index, facts.attempt, facts.incarnation, facts.kind, facts.is_greedy,
                facts.server, facts.reward, json.dumps(facts.reward_parts), facts.num_tokens, facts.num_model_tokens,
                facts.num_turns, facts.finish, facts.oldest_version, facts.newest_version, None, None,
                facts.started_at, facts.finished_at, time.time(), facts.reward_score,
            ),
        )  # fmt: skip

    def forget_trajectories(self, group: str) -> None:
        """Drop what is known of a group whose samples are made again."""
        self._change('DELETE FROM trajectories WHERE "group" = ?', (group,))

    def mark_trained(self, groups: Sequence[str], step: int, policy_version: int) -> None:
        """Record that this step, on weights of `policy_version`, trained the groups."""
        self.set_state(groups, "trained", step)
        for group in groups:
            self._change(
                'UPDATE trajectories SET step = ?, staleness = ? - oldest_version WHERE "group" = ?',
                (step, policy_version, group),
            )

    def fail(self, group: str, sample_index: int, attempt: int, server: str, boundary: str, detail: str) -> None:
        """Record why a sample did not come back. boundary: "server" when its server died while it was in flight."""
        self._change(
            "INSERT INTO failures VALUES (?, ?, ?, ?, ?, ?, ?)",
            (group, sample_index, attempt, server, boundary, detail, time.time()),
        )

    def waste(self, group: str, sample_index: int, attempt: int, reason: str, num_tokens: int) -> None:
        """Count model tokens that were generated and will not be trained.

        reason: stale, duplicate, lineage, unknown, rejected, restart, failed, filtered or endpoints.
        """
        self._change(
            "INSERT INTO waste VALUES (?, ?, ?, ?, ?, ?)",
            (group, sample_index, attempt, reason, num_tokens, time.time()),
        )

    def add_event(self, kind: str, detail: str) -> None:
        self._change("INSERT INTO events VALUES (?, ?, ?)", (time.time(), kind, detail))

    def commit(self) -> None:
        """Make what was changed survive the end of this process. Raises: OperatorError, as every change does."""
        if self._db.in_transaction:
            failpoint("ledger.commit.before")
            try:
                self._db.commit()
            except sqlite3.OperationalError as error:
                raise self._problem(error) from None
            failpoint("ledger.commit.after")

    def begin_copy(self, path: Path) -> LedgerCopy:
        """Return the copy of everything up to this moment, to be made at this path while the ledger goes on.

        Raises: OperatorError.
        """
        self.commit()
        return LedgerCopy(self._path, path)

    def snapshot(self, path: Path) -> None:
        """Write a consistent copy of everything committed, as one file. Raises: OperatorError when it cannot be."""
        self.begin_copy(path).make()

    def close(self) -> None:
        self.commit()
        self._db.close()

    def _failures_of(self, group: str) -> dict[int, list[tuple[str, str]]]:
        failures: dict[int, list[tuple[str, str]]] = {}
        for index, boundary, detail in self._db.execute(
            'SELECT sample_index, boundary, detail FROM failures WHERE "group" = ? AND boundary != ? ORDER BY rowid',
            (group, _SURVIVED),
        ):
            failures.setdefault(index, []).append((boundary, detail))
        return failures

    def _change(self, statement: str, values: tuple[object, ...]) -> None:
        """Make a change in the open transaction; the first one begins it."""
        try:
            self._db.execute(statement, values)
        except sqlite3.OperationalError as error:
            raise self._problem(error) from None

    def _problem(self, error: sqlite3.Error) -> OperatorError:
        return OperatorError(f"The ledger {self._path} cannot be written: {error}. Free the disk, then run again.")
