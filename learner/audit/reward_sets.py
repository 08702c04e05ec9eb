"""The rule that a group's samples were scored by one set of reward endpoints, and every set is recorded.

Rewards of two sets cannot be compared with each other, and an advantage is nothing but a comparison.
"""

from collections.abc import Iterator

from learner.audit.breach import Breach
from learner.audit.run import AuditedRun
from learner.ledger.schema import knows_reward_sets

_MIXED = """
SELECT "group", MAX(step), MIN(reward_set), MAX(reward_set) FROM trajectories WHERE step IS NOT NULL OR kind = 'eval'
GROUP BY "group" HAVING MIN(reward_set) != MAX(reward_set) ORDER BY "group"
"""
_UNRECORDED = """
SELECT reward_set, MIN("group"), COUNT(*) FROM trajectories
WHERE reward_set NOT IN (SELECT number FROM reward_sets) AND reward_set != 1 GROUP BY reward_set ORDER BY reward_set
"""
_USED = "SELECT reward_set, COUNT(*) FROM trajectories WHERE step IS NOT NULL GROUP BY reward_set ORDER BY reward_set"


def check_reward_sets(run: AuditedRun) -> Iterator[Breach]:
    """Yield groups that several sets scored, and sets that are nowhere recorded."""
    if not knows_reward_sets(run.db):
        return
    for group, step, oldest, newest in run.rows(_MIXED):
        problem = f"its samples were scored by the reward sets {oldest} to {newest}, expected one set"
        yield Breach("reward_set", problem, group=group, step=step)
    for number, group, count in run.rows(_UNRECORDED):
        problem = f"was scored by reward set {number}, as {count - 1} others; no such set is recorded"
        yield Breach("reward_set", problem, group=group)


def note_reward_sets(run: AuditedRun) -> list[str]:
    """Return a sentence on how many trained trajectories each set scored; none while one set scored all."""
    used = list(run.rows(_USED)) if knows_reward_sets(run.db) else []
    if len(used) < 2:
        return []
    return ["Trained trajectories by reward set: " + ", ".join(f"set {number}: {n:,}" for number, n in used) + "."]
