"""A run whose learner rank and rollout server take turns on one device, held at one place of each turn.

SLUICE_FAILPOINT stops the rank there at every pass. It is let go on at once, but when something is to be struck: then
what dies or stands still does so at that very place, or a drawn moment after it.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from deploy.cluster.ray_processes import ray_processes
from deploy.node.home import this_home
from protocol.failpoints import FAILPOINTS, VARIABLE
from tests.chaos.soak.processes import processes, signal_if_there
from tests.fakes.process_facts import has_open

TURN_FAILPOINTS = tuple(name for name in FAILPOINTS if name.startswith("device_turn."))
PLACES = (*TURN_FAILPOINTS, "weight_push.after_prepare", "weight_push.after_receive", "weight_push.after_commit")
VICTIMS = ("server", "engine", "coordinator", "rank")
# An engine starts in half a minute on two cores, and a turn may wait for its deadline before that.
GOES_ON_S = 300.0
_STEPS_AFTER = 2
_FIRST_STEP_S = 600.0  # the first run of a cluster has the warm start before it
_END_S = 180.0
_POLL_S = 0.02
_MAX_STARTS = 3  # for one strike


@dataclass(frozen=True)
class Strike:
    """What is done to whom."""

    victim: str  # one of VICTIMS
    is_kill: bool  # False: it stands still, and goes on after lasts_s
    delay_s: float  # after the rank was let go on; 0: while the rank stands at the place
    lasts_s: float

    def __str__(self) -> str:
        when = f" {self.delay_s:.2f} s after" if self.delay_s else " at"
        return f"{self.victim} {'killed' if self.is_kill else f'stopped for {self.lasts_s:.0f} s'}{when}"


class TurnRun:
    """The command under way; it is given again when it ends with an error. Every wait here lets the rank go on."""

    def __init__(self, folder: Path, place: str, staleness: int, seed: int) -> None:
        self.folder = folder
        self.num_starts = 1
        given = {
            "run.name": folder.name,
            "run.dir": folder.parent,
            "run.max_steps": 1_000_000,
            "run.seed": seed,
            "placement.devices": "shared",
            "learner.checkpoint_every_steps": 3,
            "learner.groups_per_step": 4,
            "learner.max_staleness": staleness,
            "rollout.group_size": 8,
            "eval.every_steps": 0,
        }
        parts = [part for key, value in given.items() for part in (f"--{key}", str(value))]
        self._command = [sys.executable, "-m", "learner.run", *parts]
        self._environment = {**os.environ, VARIABLE: f"{place}:stop@every"}
        self._rank: psutil.Process | None = None
        self._looked_at = 0.0
        self.process = self._give()

    def strike(self, strike: Strike) -> float:
        """Strike once the rank stands at the place; returns the seconds until two more steps were trained.

        Raises: TimeoutError when the run does not get there, or does not go on; RuntimeError when it cannot.
        """
        self._wait(lambda: bool(self._steps_since(0.0)), _FIRST_STEP_S, "train its first step")
        self._wait(self._is_at_place, GOES_ON_S, "come to the place")
        assert self._rank is not None
        rank, victim = self._rank, self._find(strike.victim)
        if strike.delay_s:
            signal_if_there(rank, signal.SIGCONT)
            time.sleep(strike.delay_s)
        begun, begun_at_s = time.monotonic(), time.time()
        while not signal_if_there(victim, signal.SIGKILL if strike.is_kill else signal.SIGSTOP):
            victim = self._find(strike.victim)  # another one is in its place since it was looked for
        if not strike.is_kill:
            self._wait_while_stopped(victim, begun + strike.lasts_s)
        self._wait(lambda: len(self._steps_since(begun_at_s)) >= _STEPS_AFTER, GOES_ON_S, f"go on after {strike}")
        return time.monotonic() - begun

    def end(self) -> int:
        """Tell the command to end, as a user would; returns its exit status. Raises: TimeoutError."""
        if self.process.poll() is None:
            self.process.terminate()
        until = time.monotonic() + _END_S
        while self.process.poll() is None:
            self._let_go_on()
            if time.monotonic() > until:
                raise TimeoutError(f"the command has not ended within {_END_S:g} s of being told to")
            time.sleep(_POLL_S)
        return self.process.returncode

    def kill(self) -> None:
        """End the command without its consent, where something has gone wrong."""
        self.process.kill()
        self.process.wait()

    def lines(self) -> list[dict[str, float]]:
        """Return what metrics.jsonl has of each step that was trained."""
        path = self.folder / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [line for line in lines if line["step"] > 0 and "at_s" in line]

    def _give(self) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(self._command, env=self._environment)

    def _steps_since(self, at_s: float) -> list[dict[str, float]]:
        return [line for line in self.lines() if line["at_s"] > at_s]

    def _wait(self, is_so: Callable[[], bool], limit_s: float, what: str) -> None:
        until, starts_before = time.monotonic() + limit_s, self.num_starts
        while not is_so():
            self._let_go_on()
            if self.process.poll() is not None:
                if self.num_starts - starts_before >= _MAX_STARTS:
                    raise RuntimeError(f"{_MAX_STARTS} starts in a row ended with an error")
                print(f"turn_kills: the command ended with {self.process.returncode}: given again", flush=True)
                self.num_starts += 1
                self.process = self._give()
            if time.monotonic() > until:
                raise TimeoutError(f"the run did not {what} within {limit_s:g} s")
            time.sleep(_POLL_S)

    def _wait_while_stopped(self, victim: psutil.Process, until: float) -> None:
        try:
            while time.monotonic() < until:
                if victim != self._rank:
                    self._let_go_on()
                time.sleep(_POLL_S)
        finally:
            signal_if_there(victim, signal.SIGCONT)

    def _is_at_place(self) -> bool:
        rank = self._living_rank()
        return rank is not None and _is_stopped(rank)

    def _let_go_on(self) -> None:
        if self._is_at_place() and self._rank is not None:
            signal_if_there(self._rank, signal.SIGCONT)

    def _living_rank(self) -> psutil.Process | None:
        """Return the rank's process; it is looked for twice a second, where there is none."""
        if self._rank is not None and not self._rank.is_running():
            self._rank = None
        if self._rank is None and time.monotonic() - self._looked_at > 0.5:
            self._looked_at = time.monotonic()
            log = f"{self.folder}/logs/rank_0"
            self._rank = next((each for each in ray_processes(this_home()) if has_open(each, log)), None)
        return self._rank

    def _find(self, kind: str) -> psutil.Process:
        assert self._rank is not None
        if kind == "rank":
            return self._rank
        found = processes(this_home()).get(kind, [])
        if not found:
            raise RuntimeError(f"there is no {kind} to strike")
        return found[0]


def _is_stopped(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False
