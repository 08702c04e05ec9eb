"""Rollout servers die and stay dead: their leases are out again within 10 s, p99.

    python -m tests.chaos.dead_server [--seed N] [--short]

100 SIGKILLs among six servers. Nobody tells the coordinator, and none is started again before its leases are out: it
has to notice by itself that the connection is gone. `--short`: 2 kills, and 30 s, since the machine may be busy.
"""

import contextlib
import random
import sqlite3
import statistics
import sys
import tempfile
from pathlib import Path

from learner import audit
from learner.disk.run_folder import LEDGER
from tests.chaos.rig.processes import Pace
from tests.chaos.rig.run import Rig
from tests.chaos.rig.settings import endless_settings, reward_service, rig_home
from tests.chaos.rig.verdict import conclude, options

_BETWEEN_S = 0.5


class _Murderer:
    """Kills a server that holds leases, waits until each of them is with another, starts it again."""

    def __init__(self, seed: int, num_kills: int) -> None:
        self.seconds: list[float] = []
        self._random = random.Random(seed)
        self._num_kills = num_kills
        self._victim: str | None = None
        self._attempts: dict[str, int] = {}
        self._killed_at = self._next_at = 0.0

    def __call__(self, rig: Rig, now: float) -> None:
        if self._victim is not None:
            self._look(rig, now)
        elif rig.step >= 2 and now >= self._next_at:
            self._strike(rig, now)

    def _strike(self, rig: Rig, now: float) -> None:
        name = self._random.choice(sorted(rig.servers))
        held = _leased_to(rig, name)
        if not held:
            return
        rig.may_revive = False
        rig.servers[name].kill()
        self._victim, self._attempts, self._killed_at = name, held, now

    def _look(self, rig: Rig, now: float) -> None:
        assert self._victim is not None
        still = _leased_to(rig, self._victim)
        if any(still.get(group) == attempt for group, attempt in self._attempts.items()):
            return
        self.seconds.append(now - self._killed_at)
        self._victim, self._next_at = None, now + _BETWEEN_S
        rig.may_revive = True
        rig.revive()
        if len(self.seconds) == self._num_kills:
            rig.stop()


def main() -> int:
    arguments = options(__doc__)
    num_kills, limit_s = (2, 30.0) if arguments.short else (100, 10.0)
    with tempfile.TemporaryDirectory() as name, rig_home(Path(name)) as keys, reward_service(Path(name)) as url:
        settings = endless_settings(Path(name), url, arguments.seed)
        murderer = _Murderer(arguments.seed, num_kills)
        pace = Pace(arguments.seed, token_s=0.01)
        rig = Rig(settings, keys, num_servers=6, pace=pace, disturb=murderer)
        print(f"dead_server: {rig.run(limit_s=1800.0)} at step {rig.step}", flush=True)
        has_audit_passed = audit.main([str(rig.folder)]) == 0
    seconds = sorted(murderer.seconds)
    p99 = seconds[min(len(seconds) - 1, int(0.99 * len(seconds)))]
    return conclude(
        "dead_server",
        p99 <= limit_s and has_audit_passed,
        kills=len(seconds),
        median_s=statistics.median(seconds),
        p99_s=p99,
        max_s=seconds[-1],
        limit_s=limit_s,
        audit="passed" if has_audit_passed else "failed",
    )


def _leased_to(rig: Rig, server: str) -> dict[str, int]:
    """Return the groups that the ledger says a server holds, with the attempt of each."""
    uri = f"file:{rig.folder / LEDGER}?mode=ro"
    with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=5.0)) as ledger:
        rows = ledger.execute(
            "SELECT \"group\", attempt FROM prompts WHERE state IN ('leased', 'pending') AND server = ?", (server,)
        )
        return dict(rows.fetchall())


if __name__ == "__main__":
    sys.exit(main())
