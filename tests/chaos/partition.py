"""The link to one of three servers is cut: training goes on without it, and with it again once the link is back.

    python -m tests.chaos.partition [--seed N] [--short]

Two network namespaces joined by a veth pair; coordinator, learner and two servers on the near host, one server on the
far one, with a reward service on each. The far host's link is cut for 45 s. Coordinator, ledger, sockets, sessions and
weight pushes over gloo are the product's own; engines are paced by script, and the learner counts instead of training.

holds: no two steps are further apart than 15 s, and some are taken after the far
server's leases went out again; within 30 s of the link's
return the same process of the far server holds the learner's weights again and trajectories of them are accepted; what
it had finished before is taken in; no prompt is skipped; the audit passes. Needs root, iproute2 and the right to make
network namespaces: where these are missing it says so and exits with 77. `--short`: a cut of 20 s, and 20 s and 60 s in
place of 15 and 30, since the machine may be busy.
"""

import contextlib
import itertools
import math
import sqlite3
import sys
import tempfile
import time
from pathlib import Path

from learner import audit
from learner.disk.run_folder import LEDGER
from tests.chaos.rig.hosted_parts import hosted_parts
from tests.chaos.rig.processes import Pace
from tests.chaos.rig.run import Rig
from tests.chaos.rig.settings import endless_settings, reward_service, rig_home
from tests.chaos.rig.two_hosts import TwoHosts, two_hosts, why_impossible
from tests.chaos.rig.verdict import conclude, options

SKIPPED = 77
_FAR = "server-2"
# Longest time between two steps, and from the link's return to trajectories with the learner's weights.
_LIMITS_S = (15.0, 30.0)
_SHORT_LIMITS_S = (20.0, 60.0)
_STEPS_BEFORE = 5
_STEPS_AFTER = 3


class _Cutter:
    """Cuts the link after some steps, joins it again, and watches both ends. Times are monotonic seconds."""

    def __init__(self, hosts: TwoHosts, cut_s: float) -> None:
        self.step_times: list[float] = []
        self.cut_at = self.joined_at = self.synced_at = self.used_at = math.inf
        self.released_at = math.inf  # the far server's leases were taken back
        self.num_taken_back = 0
        self.version_at_return = 0
        self.joined_clock = 0.0  # Unix time of the link's return
        self._num_unused_at_return = 0
        self._hosts = hosts
        self._cut_s = cut_s
        self._asked_at = 0.0
        self._steps_left = _STEPS_AFTER

    def __call__(self, rig: Rig, now: float) -> None:
        if rig.step > len(self.step_times):
            self.step_times += [now] * (rig.step - len(self.step_times))
            if max(self.used_at, self.synced_at) < math.inf:
                self._steps_left -= 1
        if self.cut_at == math.inf:
            if rig.step >= _STEPS_BEFORE:
                self.num_taken_back = _num_leased(rig.folder, _FAR)
                self._hosts.cut()
                self.cut_at = now
        elif self.joined_at == math.inf:
            self._watch_cut(rig, now)
            if now - self.cut_at >= self._cut_s:
                self._hosts.join()
                self.joined_at, self.joined_clock, self.version_at_return = now, time.time(), rig.step
                self._num_unused_at_return = _num_unused(rig)
        else:
            self._watch_return(rig, now)

    def story(self, rig: Rig) -> list[str]:
        """Return a line for each step and push near the cut, with its second after the cut."""
        events = [(at, f"step {number}") for number, at in enumerate(self.step_times, 1)]
        for at, _, version, seconds, synced, failed in rig.told:
            events.append((at, f"version {version} pushed in {seconds:.1f} s to {len(synced)}  {failed or ''}"))
        events.append((self.released_at, "the far server's leases go out again"))
        shown = sorted((at - self.cut_at, what) for at, what in events)
        return [f"partition: {second:6.1f} s  {what}" for second, what in shown if -2.0 < second < 25.0]

    def num_unused(self, rig: Rig) -> int:
        """Return how many results came in after the return for groups that others had finished meanwhile."""
        return _num_unused(rig) - self._num_unused_at_return

    def _watch_cut(self, rig: Rig, now: float) -> None:
        if now - self._asked_at > 0.2:
            self._asked_at = now
            rig.ask_status()
            if self.released_at == math.inf and _num_leased(rig.folder, _FAR) == 0:
                self.released_at = now

    def _watch_return(self, rig: Rig, now: float) -> None:
        if now - self._asked_at > 0.2:
            self._asked_at = now
            rig.ask_status()
            if self.synced_at == math.inf and _version_of(rig) >= self.version_at_return:
                self.synced_at = now
            if self.used_at == math.inf and _num_accepted(rig.folder, self.version_at_return):
                self.used_at = now
        if self._steps_left <= 0 or now - self.joined_at > 2 * max(_LIMITS_S):
            rig.stop()
            self._steps_left = 1 << 30


def main() -> int:
    arguments = options(__doc__)
    if (problem := why_impossible()) is not None:
        print(f"partition: skipped, two network namespaces cannot be made here: {problem}")
        return SKIPPED
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(two_hosts())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        keys = stack.enter_context(rig_home(folder))
        hosts.enter(hosts.near)
        url = stack.enter_context(reward_service(folder))
        far_command = ("ip", "netns", "exec", hosts.far)
        stack.enter_context(reward_service(folder, port=int(url.rpartition(":")[2].strip("/")), on_host=far_command))
        cutter = _Cutter(hosts, 20.0 if arguments.short else 45.0)
        parts = hosted_parts(hosts, {"server-0": False, "server-1": False, _FAR: True})
        settings = endless_settings(folder, url, arguments.seed)
        pace = Pace(arguments.seed, token_s=0.004, step_s=0.3)
        rig = Rig(settings, keys, num_servers=3, pace=pace, disturb=cutter, parts=parts)
        print(f"partition: {rig.run(limit_s=240.0)} at step {rig.step}", flush=True)
        for line in cutter.story(rig):
            print(line)
        has_audit_passed = audit.main([str(rig.folder)]) == 0
        return _conclude(rig, cutter, has_audit_passed, *(_SHORT_LIMITS_S if arguments.short else _LIMITS_S))


def _conclude(rig: Rig, cutter: _Cutter, has_audit_passed: bool, standstill_limit_s: float, back_limit_s: float) -> int:
    during = [cutter.cut_at, *(at for at in cutter.step_times if cutter.cut_at < at < cutter.joined_at)]
    standstill_s = max(b - a for a, b in itertools.pairwise([*during, cutter.joined_at]))
    num_kept = cutter.num_unused(rig) + _query(
        rig.folder,
        "SELECT COUNT(*) FROM trajectories WHERE server = ? AND received_at > ? AND finished_at < ?",
        _FAR,
        cutter.joined_clock,
        cutter.joined_clock,
    )
    pushes_s = [seconds for _, verb, _, seconds, *_ in rig.told if verb == "weights"]
    synced_s, used_s = cutter.synced_at - cutter.joined_at, cutter.used_at - cutter.joined_at
    num_skipped = _query(rig.folder, "SELECT COUNT(*) FROM prompts WHERE state = 'skipped'")
    holds = (
        standstill_s <= standstill_limit_s
        and during[-1] > cutter.released_at
        and max(pushes_s) <= standstill_limit_s
        and max(synced_s, used_s) <= back_limit_s
        and num_kept > 0
        and cutter.num_taken_back > 0
        and num_skipped == 0
        and not any(name.startswith("deaths") for name in rig.counts)
        and has_audit_passed
    )
    return conclude(
        "partition",
        holds,
        cut_s=cutter.joined_at - cutter.cut_at,
        steps_while_cut=len(during) - 1,
        standstill_s=standstill_s,
        longest_push_s=max(pushes_s),
        synced_after_s=synced_s,
        used_after_s=used_s,
        kept_results=num_kept,
        taken_back=cutter.num_taken_back,
        skipped=num_skipped,
        audit="passed" if has_audit_passed else "failed",
    )


def _version_of(rig: Rig) -> int:
    """Return the policy version that the far server last said it holds, -1 while it holds none."""
    beat = (rig.status.get("servers") or {}).get(_FAR) or {}
    version = beat.get("policy_version")
    return -1 if version is None else int(version)


def _num_leased(folder: Path, server: str) -> int:
    """Return how many groups a server has leases of."""
    return _query(folder, "SELECT COUNT(*) FROM prompts WHERE state = 'leased' AND server = ?", server)


def _num_accepted(folder: Path, version: int) -> int:
    """Return how many trajectories of the far server begin with this version or a later one."""
    return _query(folder, "SELECT COUNT(*) FROM trajectories WHERE server = ? AND oldest_version >= ?", _FAR, version)


def _num_unused(rig: Rig) -> int:
    counts = rig.status.get("counts") or {}
    return sum(number for name, number in counts.items() if name.startswith("unused:"))


def _query(folder: Path, query: str, *values: object) -> int:
    with contextlib.closing(sqlite3.connect(f"file:{folder / LEDGER}?mode=ro", uri=True, timeout=5.0)) as ledger:
        return int(ledger.execute(query, values).fetchone()[0] or 0)


if __name__ == "__main__":
    sys.exit(main())
