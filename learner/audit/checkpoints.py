"""The rule that every kept checkpoint is whole, its copy of the ledger equals the run's ledger up to its step, and its
policy has the updates that metrics.jsonl counts.

A checkpoint of a lost lineage (the run was resumed from an older one) is noted and not compared.
"""

import json
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field

from learner.audit.run import AuditedRun, Breach
from learner.audit.steps import Steps
from learner.checkpoint.folder import LATEST
from learner.checkpoint.manifest import Checkpoint, CorruptCheckpointError, verify
from learner.disk.run_folder import CHECKPOINTS, LEDGER, parse_metrics_line, read_only_uri
from learner.ledger.ledger import HELD_LINE

# A running run removes its old checkpoints, file by file.
_REMOVAL_S = 1.0
_SETTLED = "state IN ('trained', 'skipped')"
_PROMPT_COLUMNS = ("epoch", "uid", "position", "state", "step", "reason")
_TRAJECTORY_COLUMNS = (
    "attempt", "incarnation", "server", "reward", "reward_parts", "num_tokens", "num_model_tokens",
    "oldest_version", "newest_version", "step", "staleness",
)  # fmt: skip


@dataclass
class CheckpointAudit:
    """The checkpoints without a breach."""

    valid: list[str] = field(default_factory=list)  # names of the folders that verify, in step order
    lost: dict[str, int] = field(default_factory=dict)  # checkpoint of a lost lineage -> start that made it

    @property
    def notes(self) -> list[str]:
        """Sentences about checkpoints of lost lineages."""
        return [
            f"{CHECKPOINTS}/{name} was made by start {start}; the run continued from an older checkpoint."
            for name, start in self.lost.items()
        ]


def check_checkpoints(run: AuditedRun, steps: Steps, audit: CheckpointAudit) -> Iterator[Breach]:
    """Yield the breaches of the checkpoints; names and notes of the others are added to `audit`."""
    root = run.folder / CHECKPOINTS
    updates = _updates_by_step(run)
    for path in run.checkpoints:
        try:
            checkpoint = verify(path)
        except CorruptCheckpointError as error:
            time.sleep(_REMOVAL_S)
            if path.exists():
                yield Breach("checkpoint", str(error).replace(f"{run.folder}/", ""), f"{CHECKPOINTS}/{path.name}")
            continue
        audit.valid.append(path.name)
        yield from _check_ledger(run, steps, checkpoint, audit)
        if path.name not in audit.lost:
            yield from _check_updates(checkpoint, updates)
    latest = root / LATEST
    if latest.is_symlink() and not latest.exists():
        name = latest.readlink()
        yield Breach("checkpoint", f"points at {name}, which is not there", f"{CHECKPOINTS}/{LATEST}")


def _check_ledger(run: AuditedRun, steps: Steps, checkpoint: Checkpoint, audit: CheckpointAudit) -> Iterator[Breach]:
    folder = f"{CHECKPOINTS}/{checkpoint.path.name}"
    path = checkpoint.path / LEDGER
    if not path.exists():
        if checkpoint.path.exists():  # the run may have removed it
            yield Breach("checkpoint_ledger", "is missing", f"{folder}/{LEDGER}")
        return
    try:
        # A connection of its own: a database cannot be detached from an open transaction.
        with closing(sqlite3.connect(read_only_uri(path), uri=True)) as db:
            db.execute("ATTACH ? AS live", (read_only_uri(run.folder / LEDGER),))
            if (start := _lost_start(run, db, checkpoint)) is None:
                yield from _compare(db, steps, checkpoint, f"{folder}/{LEDGER}")
            else:
                audit.lost[checkpoint.path.name] = start
    except sqlite3.Error as error:
        if checkpoint.path.exists():
            yield Breach("checkpoint_ledger", f"cannot be read: {error}", f"{folder}/{LEDGER}")


def _check_updates(checkpoint: Checkpoint, updates: Mapping[int, int | None]) -> Iterator[Breach]:
    """Yield a breach when a rank trained a step's batch twice, or not at all, whatever the coordinator's ledger says.

    A run whose earlier steps are in another folder, or of a version that counted no updates, is not compared.
    """
    path = checkpoint.path / "state" / "policy" / "state.json"
    counted = [updates.get(step) for step in range(1, checkpoint.step + 1)]
    known = [number for number in counted if number is not None]
    if len(known) < len(counted) or not path.exists():
        return
    inside = int(json.loads(path.read_text(encoding="utf-8"))["num_updates"])
    if inside != sum(known):
        problem = f"has {inside} updates of the policy, metrics.jsonl counts {sum(known)} up to step {checkpoint.step}"
        yield Breach("updates", problem, f"{CHECKPOINTS}/{checkpoint.path.name}/state/policy/state.json")


def _updates_by_step(run: AuditedRun) -> dict[int, int | None]:
    """Return the policy's updates of each step by its line of metrics; None for a line that does not count them."""
    texts: list[bytes | str] = [*run.metrics.split(b"\n"), run.meta(HELD_LINE) or ""]
    updates: dict[int, int | None] = {}
    for line in map(parse_metrics_line, texts):
        if line is not None:
            # A step that trained the critic alone has no loss and no updates of the policy.
            number = line.get("policy/num_updates", None if "policy/loss" in line else 0)
            updates[int(line["step"])] = None if number is None else int(number)
    return updates


def _lost_start(run: AuditedRun, db: sqlite3.Connection, checkpoint: Checkpoint) -> int | None:
    """Return the start that made a checkpoint of a lost lineage; None for a checkpoint of the surviving one."""
    start = db.execute("SELECT MAX(number) FROM main.incarnations").fetchone()[0]
    if start is None:
        return None
    is_known = db.execute("SELECT COUNT(*) FROM live.incarnations WHERE number = ?", (start,)).fetchone()[0]
    newest = run.last_shared_version(start)
    is_lost = not is_known or (newest is not None and checkpoint.policy_version > newest)
    return int(start) if is_lost else None


def _compare(db: sqlite3.Connection, steps: Steps, checkpoint: Checkpoint, file: str) -> Iterator[Breach]:
    step = checkpoint.step
    if step > steps.last:
        yield Breach("checkpoint_ledger", f"is of step {step}, the run's ledger ends at step {steps.last}", file)
        return
    if checkpoint.policy_version != (version := steps.policy_version_after(step)):
        problem = f"is of policy version {checkpoint.policy_version}, by the run's ledger it is {version}"
        yield Breach("checkpoint_ledger", problem, file, step=step)
    later_groups = f'SELECT "group", step FROM main.prompts WHERE {_SETTLED} AND step > ?'  # noqa: S608
    for group, later in db.execute(later_groups, (step,)):
        problem = f"is accounted for by step {later}, after the checkpoint's step {step}"
        yield Breach("checkpoint_ledger", problem, file, group)
    for table in ("prompts", "trajectories"):
        for group, of_step in db.execute(_changed_rows(table), (step,)):
            problem = "is not in the run's ledger as it is in this copy"
            yield Breach("checkpoint_ledger", problem, file, group, of_step)
        for group, of_step in db.execute(_added_rows(table), (step,)):
            problem = "is accounted for in the run's ledger, but not in this copy"
            yield Breach("checkpoint_ledger", problem, file, group, of_step)


def _changed_rows(table: str) -> str:
    """Return the query for groups whose settled rows in the copy differ from those in the run's ledger."""
    columns = _PROMPT_COLUMNS if table == "prompts" else _TRAJECTORY_COLUMNS
    differs = " OR ".join(f"copy.{column} IS NOT run.{column}" for column in columns)
    settled = f"{_SETTLED} AND (copy.step <= ?1 OR copy.step IS NULL)" if table == "prompts" else "copy.step <= ?1"
    return (
        f'SELECT DISTINCT copy."group", copy.step FROM main.{table} AS copy LEFT JOIN live.{table} AS run '  # noqa: S608
        f"ON {_same_key(table)} WHERE {settled.replace('state', 'copy.state')} AND ({differs}) ORDER BY 2, 1"
    )


def _added_rows(table: str) -> str:
    """Return the query for groups that are settled by the checkpoint's step in the run's ledger and not in the copy."""
    settled = "{0}.step <= ?1" + (f" AND {_SETTLED.replace('state', '{0}.state')}" if table == "prompts" else "")
    return (
        f'SELECT DISTINCT run."group", run.step FROM live.{table} AS run LEFT JOIN main.{table} AS copy '  # noqa: S608
        f'ON {_same_key(table)} AND {settled.format("copy")} WHERE {settled.format("run")} AND copy."group" IS NULL '
        "ORDER BY 2, 1"
    )


def _same_key(table: str) -> str:
    same = 'copy."group" = run."group"'
    return same if table == "prompts" else f"{same} AND copy.sample_index = run.sample_index"
