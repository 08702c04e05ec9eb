"""A learner that stands still under 64 servers: the window holds, nothing is dropped, and the rate comes back.

    python -m tests.chaos.stall [--seed N] [--short]

64 rollout servers fill the window while the learner takes 60 s for one step. Outstanding groups must never be above the
window, the coordinator's memory grows by at most 64 MB + 1.3 x the window's bytes, and within 5 s after the stall the
learner trains at 95 % of the rate of before. `--short`: 12 servers, 6 s, and rates over 3 s in place of 10.
"""

import math
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil

from learner import audit
from learner.disk.run_folder import LEDGER
from tests.chaos.rig.counting import trajectory_bytes
from tests.chaos.rig.processes import Pace
from tests.chaos.rig.run import Rig
from tests.chaos.rig.settings import reward_service, rig_home, rig_settings
from tests.chaos.rig.verdict import conclude, options

_BACK_WITHIN_S = 5.0
_GROUPS_PER_STEP = 32


class _Watcher:
    """Lets the run come to its pace, stalls the learner once, watches it come back, and looks at the window always."""

    def __init__(self, stall_s: float, rate_over_s: float) -> None:
        self.most_outstanding = self.memory_before = self.memory_most = 0
        self.rate_before = 0.0
        self.back_after_s = math.inf
        self.rate_after = 0.0
        self._stall_s = stall_s
        self._rate_over_s = rate_over_s
        self._steps: list[tuple[float, int]] = []
        self._stalled_at: float | None = None
        self._looked_at = 0.0
        self._process: psutil.Process | None = None

    def __call__(self, rig: Rig, now: float) -> None:
        if not self._steps or rig.step > self._steps[-1][1]:
            self._steps.append((now, rig.step))
        if now - self._looked_at > 0.1:
            self._looked_at = now
            self._look(rig)
        begun_at = next((at for at, step in self._steps if step >= 3), None)
        if self._stalled_at is None:
            if begun_at is not None and now - begun_at > self._rate_over_s:
                self.rate_before = self._rate(begun_at, now)
                assert rig.learner is not None
                rig.learner.tell("stall", self._stall_s)
                self._stalled_at = now
        elif now > self._stalled_at + self._stall_s + _BACK_WITHIN_S + self._rate_over_s:
            self._judge()
            rig.stop()
            self._stalled_at = math.inf

    def _look(self, rig: Rig) -> None:
        self.most_outstanding = max(self.most_outstanding, int(rig.status.get("window_used", 0)))
        rig.ask_status()
        if self._process is None and rig.learner is not None and rig.coordinator is not None:
            self._process = psutil.Process(rig.coordinator.process.pid)
            self.memory_before = self._process.memory_info().rss
        if self._process is not None and self._process.is_running():
            self.memory_most = max(self.memory_most, self._process.memory_info().rss)

    def _judge(self) -> None:
        """Find when the rate over a second reached 95 % of what it was, and what it was over the seconds after that."""
        assert self._stalled_at is not None
        end = self._stalled_at + self._stall_s
        wanted = 0.95 * self.rate_before
        for tenth in range(10, 10 * int(_BACK_WITHIN_S + self._rate_over_s)):
            until = end + tenth / 10
            if self._rate(until - 1.0, until) >= wanted:
                self.back_after_s = tenth / 10
                break
        self.rate_after = self._rate(end + _BACK_WITHIN_S, end + _BACK_WITHIN_S + self._rate_over_s)

    def _rate(self, begin: float, end: float) -> float:
        """Return groups trained per second between two times."""
        return _GROUPS_PER_STEP * sum(begin < at <= end for at, _ in self._steps) / (end - begin)


def main() -> int:
    arguments = options(__doc__)
    num_servers, stall_s, rate_over_s = (12, 6.0, 3.0) if arguments.short else (64, 60.0, 10.0)
    with tempfile.TemporaryDirectory() as name, rig_home(Path(name)) as keys, reward_service(Path(name)) as url:
        settings = rig_settings(
            Path(name),
            url,
            num_prompts=64_000,
            epochs=1,
            seed=arguments.seed,
            learner={"groups_per_step": _GROUPS_PER_STEP, "max_staleness": 7, "checkpoint_every_steps": 100},
            rollout={"group_size": 4},
        )
        watcher = _Watcher(stall_s, rate_over_s)
        # A learner that is the slowest part, so that its rate says when it is back.
        rig = Rig(settings, keys, num_servers, Pace(arguments.seed, step_s=1.0), disturb=watcher)
        begun = time.monotonic()
        print(f"stall: {rig.run(limit_s=900.0)} at step {rig.step}, {time.monotonic() - begun:.0f} s", flush=True)
        has_audit_passed = audit.main([str(rig.folder)]) == 0
        window = 8 * _GROUPS_PER_STEP
        window_bytes = window * 4 * statistics.mean(trajectory_bytes(rig.folder / LEDGER))
    limit = (64 << 20) + 1.3 * window_bytes
    grown = watcher.memory_most - watcher.memory_before
    holds = (
        watcher.most_outstanding <= window
        and watcher.back_after_s <= _BACK_WITHIN_S
        and watcher.rate_after >= 0.95 * watcher.rate_before
        and grown <= limit
        and has_audit_passed
    )
    return conclude(
        "stall",
        holds,
        servers=num_servers,
        stall_s=stall_s,
        most_outstanding=watcher.most_outstanding,
        window=window,
        groups_per_s_before=watcher.rate_before,
        groups_per_s_after=watcher.rate_after,
        back_after_s=watcher.back_after_s,
        memory_growth_mb=grown / 2**20,
        memory_limit_mb=limit / 2**20,
        audit="passed" if has_audit_passed else "failed",
    )


if __name__ == "__main__":
    sys.exit(main())
