"""Rollout servers without a free core that answer nothing for 5 s again and again: none is taken for dead.

    python -m tests.chaos.busy_server [--seed N] [--short]

Ten minutes; two processes burn both cores beside four servers, whose event loops stand still for 5 s at random moments.
None may lose its leases, and the run goes on. `--short`: 8 s, with stalls of 3 s.
"""

import contextlib
import multiprocessing
import random
import sqlite3
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from learner import audit
from learner.disk.run_folder import LEDGER
from tests.chaos.rig.processes import Pace
from tests.chaos.rig.run import Rig
from tests.chaos.rig.settings import endless_settings, reward_service, rig_home
from tests.chaos.rig.verdict import conclude, options


class _Staller:
    """Has one server after the other stand still."""

    def __init__(self, seed: int, seconds: float, stall_s: float) -> None:
        self.num_stalls = 0
        self._random = random.Random(seed)
        self._seconds = seconds
        self._stall_s = stall_s
        self._begun_at: float | None = None
        self._next_at = 0.0

    def __call__(self, rig: Rig, now: float) -> None:
        if rig.step < 1:
            return
        if self._begun_at is None:
            self._begun_at = now
        if now - self._begun_at > self._seconds:
            rig.stop()
            self._begun_at = float("inf")
        elif now >= self._next_at:
            rig.servers[self._random.choice(sorted(rig.servers))].tell("stall", self._stall_s)
            self.num_stalls += 1
            self._next_at = now + self._random.uniform(0.5, 1.5) * self._stall_s


def main() -> int:
    arguments = options(__doc__)
    seconds, stall_s = (8.0, 3.0) if arguments.short else (600.0, 5.0)
    with tempfile.TemporaryDirectory() as name, rig_home(Path(name)) as keys, reward_service(Path(name)) as url:
        settings = endless_settings(Path(name), url, arguments.seed)
        staller = _Staller(arguments.seed, seconds, stall_s)
        rig = Rig(settings, keys, num_servers=4, pace=Pace(arguments.seed, token_s=0.01), disturb=staller)
        with _burning(2):
            print(f"busy_server: {rig.run(limit_s=seconds + 300.0)} at step {rig.step}", flush=True)
        has_audit_passed = audit.main([str(rig.folder)]) == 0
        with contextlib.closing(sqlite3.connect(rig.folder / LEDGER)) as ledger:
            num_dead = ledger.execute("SELECT COUNT(*) FROM failures WHERE boundary = 'server'").fetchone()[0]
    return conclude(
        "busy_server",
        num_dead == 0 and has_audit_passed,
        seconds=seconds,
        stalls=staller.num_stalls,
        stall_s=stall_s,
        steps=rig.step,
        samples_lost_to_deaths=num_dead,
        audit="passed" if has_audit_passed else "failed",
    )


@contextlib.contextmanager
def _burning(num_processes: int) -> Iterator[None]:
    burners = [multiprocessing.get_context("fork").Process(target=_burn, daemon=True) for _ in range(num_processes)]
    for burner in burners:
        burner.start()
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.join()


def _burn() -> None:
    while time.monotonic():
        sum(range(1000))


if __name__ == "__main__":
    sys.exit(main())
