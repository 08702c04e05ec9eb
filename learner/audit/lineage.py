"""The rule that nothing of a lost lineage was trained: weights that died with a start of the run leave no trace."""

from collections.abc import Iterator

from learner.audit.breach import Breach
from learner.audit.run import AuditedRun


def last_shared_version(run: AuditedRun, incarnation: int) -> int | None:
    """Return the newest version that something of this start may contain, None when no start came after it."""
    row = run.db.execute("SELECT MIN(policy_version) FROM incarnations WHERE number > ?", (incarnation,)).fetchone()
    return None if row[0] is None else int(row[0])


def check_lineage(run: AuditedRun) -> Iterator[Breach]:
    """Yield groups that were trained on versions which a later start of the run took back."""
    num_starts = int(run.meta("incarnation") or 0)
    for incarnation, newest in run.rows(
        "SELECT incarnation, MAX(newest_version) FROM trajectories WHERE step IS NOT NULL "
        "GROUP BY incarnation ORDER BY incarnation"
    ):
        if incarnation > num_starts:
            problem = f"trajectories were made for start {incarnation} of the run, which has started {num_starts} times"
            yield Breach("lineage", problem)
        valid = last_shared_version(run, incarnation)
        if valid is not None and newest > valid:
            yield from _name_groups(run, incarnation, valid)


def _name_groups(run: AuditedRun, incarnation: int, valid: int) -> Iterator[Breach]:
    for group, step, newest in run.rows(
        'SELECT "group", step, MAX(newest_version) FROM trajectories WHERE step IS NOT NULL AND incarnation = ? '
        'AND newest_version > ? GROUP BY "group" ORDER BY step, "group"',
        incarnation,
        valid,
    ):
        problem = f"contains policy version {newest} of start {incarnation}, after which the run began again at {valid}"
        yield Breach("lineage", problem, group=group, step=step)
