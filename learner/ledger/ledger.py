"""The ledger: the state of every leased prompt and the facts of every trajectory, in SQLite, in the run folder.

One thread writes it; reports and audits may read it at any time. A prompt that was never leased has no row.
"""

import json
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from learner.ledger.schema import UNFINISHED, prepare_schema
from learner.ledger.snapshots import LedgerCopy
from protocol.disk.files import replace_file
from protocol.errors import OperatorError
from protocol.failpoints import failpoint
from protocol.settings.settings import Settings
from protocol.wire.trajectory import TrajectoryFacts

# In `meta`: the JSON of the metrics line that waits for an evaluation, or "".
HELD_LINE = "held_line"
# Beginning of the reason of a group that was skipped with its step.
NOT_APPLIED = "step not applied: "
# In `meta`: the first step, and the first start, that the current reward endpoints and code score; absent: all.
REWARDS_SINCE_STEP, REWARDS_SINCE_START = "rewards_since_step", "rewards_since_start"


@dataclass(frozen=True)
class LeasedPrompt:
    """A prompt that an earlier start leased and did not train."""

    group: str
    epoch: int  # pass over the data
    uid: str
    position: int  # place in the prompt order
    attempt: int  # number of leases of the group
    # sample -> (boundary, detail) of each failure, in order
    failures: dict[int, list[tuple[str, str]]] = field(default_factory=dict)


class Ledger:
    """Changes are in one transaction until `commit`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._incarnations = path.with_name("incarnation")
        self._scored_by = path.with_name("scored_by.json")
        # The first start whose results have rewards of the present endpoints, and samples of the present settings.
        self.scored_since_start = self.sampled_since_start = 0
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

    def attach(self, file: str, name: str, tables: str) -> Callable[[str, tuple[object, ...]], None]:
        """Attach a database beside the ledger's file, which stays when the ledger goes back; returns `change`.

        change(statement, values): makes a change in the ledger's transaction. Raises: OperatorError.
        """
        path = self._path.with_name(file)
        self.commit()  # nothing is attached inside a transaction
        try:
            self._db.execute(f"ATTACH ? AS {name}", (str(path),))
            self._db.execute(f"PRAGMA {name}.journal_mode=WAL")
            self._db.execute(f"PRAGMA {name}.synchronous=NORMAL")
            self._db.executescript(tables)
        except sqlite3.Error as error:
            raise OperatorError(f"{path} cannot be opened: {error}. Check the disk and the folder.") from None
        return self._change

    def begin_incarnation(self, policy_version: int) -> int:
        """Return the number of this start of the run, from 1, and record the version of its weights.

        A file next to the ledger has all starts: a restored ledger has those that led to its checkpoint. With a reused
        number, messages of the earlier start would be accepted.
        """
        starts = self._all_starts()
        parent = int(self.meta("incarnation") or 0)
        incarnation = max([parent, *starts]) + 1
        self.set_meta("incarnation", str(incarnation))
        self._change("INSERT INTO incarnations VALUES (?, ?, ?)", (incarnation, time.time(), policy_version))
        self.commit()
        # A crash here repeats the number, which no message has carried yet.
        failpoint("ledger.incarnation.committed")
        content = json.dumps({**starts, incarnation: [parent, policy_version]})
        replace_file(self._incarnations, content.encode())
        failpoint("ledger.incarnation.replaced")
        return incarnation

    def last_shared_version(self, incarnation: int) -> int | None:
        """Return the newest version that a trajectory of an earlier start may contain; None if none is known to be.

        Example: a run at version 23 resumed from a checkpoint of version 20. Its versions 21 to 23 are other weights
        now, so the earlier start's tokens of those versions must not be trained. If the run then goes back to a
        checkpoint of the earlier start, the second start is not in the ledger: it shares what its parent had then.
        Starts without a checkpoint share nothing: the first weights may be others now.
        """
        starts, left_at = self._all_starts(), list[int]()
        while not self._db.execute("SELECT 1 FROM incarnations WHERE number = ?", (incarnation,)).fetchone():
            incarnation, version = starts.get(incarnation, (0, 0))
            if not incarnation:
                return None
            left_at.append(version)
        row = self._db.execute("SELECT MIN(policy_version) FROM incarnations WHERE number > ?", (incarnation,))
        version = row.fetchone()[0]
        return None if version is None else min([int(version), *left_at])

    def _all_starts(self) -> dict[int, list[int]]:
        """Return every start -> [the start (or 0) whose checkpoint it resumed, its first version]."""
        known = json.loads(self._incarnations.read_text("utf-8")) if self._incarnations.exists() else {}
        return {int(number): start for number, start in known.items()}

    def begin_terms(self, from_step: int, terms: Mapping[str, int | float | str]) -> None:
        """Record the settings by which the audit measures steps from this one on."""
        for name, value in terms.items():
            self._change("INSERT OR REPLACE INTO terms VALUES (?, ?, ?)", (from_step, name, value))

    def begin_rewards(
        self, source: str, sampled_by: str, from_step: int, incarnation: int, *, is_edited: bool = False
    ) -> str | None:
        """Record what decides the reward from this start on; returns the earlier source if it was another one.

        source: `RewardsSettings.reward_source`. sampled_by: hash of what decides a sample. from_step: the first step of
        this start. is_edited: the code of the same source is another one.
        """
        self._note_made_by(source, sampled_by, incarnation)
        earlier = self.meta("reward_source")
        self.set_meta("reward_source", source)
        if earlier is None or (earlier == source and not is_edited):
            return None
        self.set_meta(REWARDS_SINCE_STEP, str(from_step))
        self.set_meta(REWARDS_SINCE_START, str(incarnation))
        if earlier == source:
            return None
        self.add_event("rewards", f"{earlier} became {source}")
        return earlier

    def begin_sets(self, sets: Mapping[str, str], from_step: int) -> tuple[dict[str, int], list[str]]:
        """Record what decides the scores of held-out sets from this start on.

        sets: name -> `HeldOutSet.identity`. from_step: the first step of this start.
        Returns (name -> first step that the present set of that name scored, unless it scored all; names that changed).
        """
        changed = [name for name, identity in sets.items() if self.meta(f"eval_set:{name}") not in (None, identity)]
        for name, identity in sets.items():
            self.set_meta(f"eval_set:{name}", identity)
            if name in changed:
                self.set_meta(f"eval_set_since:{name}", str(from_step))
        since = {name: int(self.meta(f"eval_set_since:{name}") or 0) for name in sets}
        return {name: step for name, step in since.items() if step}, changed

    def begin_code(self, digests: Mapping[str, str]) -> list[str]:
        """Record the user's files of this start, path -> digest; returns those that an earlier start had otherwise."""
        edited = [path for path, digest in digests.items() if self.meta(f"code:{path}") not in (None, digest)]
        for path, digest in digests.items():
            self.set_meta(f"code:{path}", digest)
        for path in edited:
            self.add_event("code", f"{path} was edited")
        return edited

    def _note_made_by(self, source: str, sampled_by: str, incarnation: int) -> None:
        """Set `scored_since_start` and `sampled_since_start` from a file next to the ledger.

        The ledger, restored with a checkpoint, does not know every start that made the results kept by servers.
        """
        known = json.loads(self._scored_by.read_text(encoding="utf-8")) if self._scored_by.exists() else {}
        scored, since = known.get("source"), int(known.get("since_start", self.meta(REWARDS_SINCE_START) or 0))
        sampled, sampled_since = known.get("sampled_by"), int(known.get("sampled_since_start", 0))
        earlier = scored or self.meta("reward_source") or source
        self.scored_since_start = since if earlier == source else incarnation
        self.sampled_since_start = sampled_since if sampled in (None, sampled_by) else incarnation
        content = {
            "source": source,
            "since_start": self.scored_since_start,
            "sampled_by": sampled_by,
            "sampled_since_start": self.sampled_since_start,
        }
        replace_file(self._scored_by, json.dumps(content).encode())

    def claim(self, key: str, value: str) -> str | None:
        """Record a value that must not change between the starts of a run; returns the first start's if it differs."""
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
        """Return the unfinished prompts of earlier starts, oldest first; their state becomes pending.

        Their trajectories are dropped and counted as waste.
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
            self.delete_trajectories(prompt.group)
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

    def add_skipped(self, group: str, epoch: int, uid: str, position: int, reason: str) -> None:
        self._change(
            "INSERT INTO prompts VALUES (?, ?, ?, ?, 'skipped', NULL, 0, NULL, ?, ?) ON CONFLICT DO NOTHING",
            (group, epoch, uid, position, reason, time.time()),
        )

    def reason_of(self, group: str) -> str | None:
        """Return the reason of a group's state; None without one."""
        row = self._db.execute('SELECT reason FROM prompts WHERE "group" = ?', (group,)).fetchone()
        return None if row is None else row[0]

    def scores_of(self, group: str) -> list[tuple[float, dict[str, float]]]:
        """Return score and the reward's parts of each sample of a trained or skipped group, in the order of samples.

        A sample without a score has its reward instead. Samples that earlier reward endpoints scored are excluded.
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
        self._change_many(
            'UPDATE prompts SET state = ?, step = ?, reason = ?, changed_at = ? WHERE "group" = ?',
            [(state, step, reason, now, group) for group in groups],
        )

    def add_trajectory(self, facts: TrajectoryFacts) -> None:
        self._change(
            'INSERT OR REPLACE INTO trajectories ("group", sample_index, attempt, incarnation, kind, is_greedy, '
            "server, reward, reward_parts, num_tokens, num_model_tokens, num_turns, finish, oldest_version, "
            "newest_version, started_at, finished_at, received_at, reward_score) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                facts.group, facts.sample_index, facts.attempt, facts.incarnation, facts.kind, facts.is_greedy,
                facts.server, facts.reward, json.dumps(facts.reward_parts), facts.num_tokens, facts.num_model_tokens,
                facts.num_turns, facts.finish, facts.oldest_version, facts.newest_version, facts.started_at,
                facts.finished_at, time.time(), facts.reward_score,
            ),
        )  # fmt: skip

    def delete_trajectories(self, group: str) -> None:
        """Delete the trajectories of a group whose samples are generated again."""
        self._change('DELETE FROM trajectories WHERE "group" = ?', (group,))

    def mark_trained(self, groups: Sequence[str], step: int, policy_version: int) -> None:
        """Record that this step, on weights of `policy_version`, trained the groups."""
        self.set_state(groups, "trained", step)
        self._change_many(
            'UPDATE trajectories SET step = ?, staleness = ? - oldest_version WHERE "group" = ?',
            [(step, policy_version, group) for group in groups],
        )

    def num_trained_tokens(self) -> int:
        """Return the number of model tokens that all steps have trained."""
        query = "SELECT COALESCE(SUM(num_model_tokens), 0) FROM trajectories WHERE kind = 'train' AND step IS NOT NULL"
        return int(self._db.execute(query).fetchone()[0])

    def add_failure(self, group: str, sample_index: int, attempt: int, server: str, boundary: str, detail: str) -> None:
        """Record a failure of a sample. boundary: "server" when its server died."""
        self._change(
            "INSERT INTO failures VALUES (?, ?, ?, ?, ?, ?, ?)",
            (group, sample_index, attempt, server, boundary, detail, time.time()),
        )

    def add_waste(self, group: str, sample_index: int, attempt: int, reason: str, num_tokens: int) -> None:
        """Record model tokens that are not trained.

        reason: stale, duplicate, lineage, unknown, rejected, restart, failed, filtered, endpoints or settings.
        """
        self._change(
            "INSERT INTO waste VALUES (?, ?, ?, ?, ?, ?)",
            (group, sample_index, attempt, reason, num_tokens, time.time()),
        )

    def add_event(self, kind: str, detail: str) -> None:
        self._change("INSERT INTO events VALUES (?, ?, ?)", (time.time(), kind, detail))

    def commit(self) -> None:
        """Commit the changes: they survive the end of this process. Raises: OperatorError, as every change does."""
        if self._db.in_transaction:
            failpoint("ledger.commit.before")
            try:
                self._db.commit()
            except sqlite3.OperationalError as error:
                raise self._problem(error) from None
            failpoint("ledger.commit.after")

    def begin_copy(self, path: Path) -> LedgerCopy:
        """Return the copy of the ledger at this moment; its `make` writes the file. Raises: OperatorError."""
        self.commit()
        return LedgerCopy(self._path, path)

    def close(self, *, is_failed: bool = False) -> None:
        """Close the ledger. is_failed: changes since the last commit are dropped: they may be a part of a step."""
        if is_failed:
            self._db.rollback()
        self.commit()
        self._db.close()

    def _failures_of(self, group: str) -> dict[int, list[tuple[str, str]]]:
        failures: dict[int, list[tuple[str, str]]] = {}
        for index, boundary, detail in self._db.execute(
            'SELECT sample_index, boundary, detail FROM failures WHERE "group" = ? ORDER BY rowid', (group,)
        ):
            failures.setdefault(index, []).append((boundary, detail))
        return failures

    def _change(self, statement: str, values: tuple[object, ...]) -> None:
        """Make a change in the open transaction; the first one begins it."""
        try:
            self._db.execute(statement, values)
        except sqlite3.OperationalError as error:
            raise self._problem(error) from None

    def _change_many(self, statement: str, rows: Sequence[tuple[object, ...]]) -> None:
        try:
            if rows:
                self._db.executemany(statement, rows)
        except sqlite3.OperationalError as error:
            raise self._problem(error) from None

    def _problem(self, error: sqlite3.Error) -> OperatorError:
        return OperatorError(f"The ledger {self._path} cannot be written: {error}. Free the disk, then run again.")


def terms_of(settings: Settings) -> dict[str, int | float | str]:
    """Return the settings by which the audit measures a step: a resumed run may have others than its earlier steps."""
    return {
        "group_size": settings.rollout.group_size,
        "groups_per_step": settings.learner.groups_per_step,
        "max_staleness": settings.learner.max_staleness,
        "endpoints": settings.rewards.describe_endpoints(),
    }
