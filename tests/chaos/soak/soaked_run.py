"""The quick start's command with no end, given again when faults have ended it."""

import subprocess
import sys
import time
from pathlib import Path

from tests.chaos.soak.step_lines import Line, read_lines

_FIRST_STEP_S = 900.0
_END_S = 180.0
_POLL_S = 0.5
GROUPS_PER_STEP, GROUP_SIZE = 8, 8


class SoakedRun:
    """One run, by as many commands as it takes."""

    def __init__(self, folder: Path, seed: int, is_short: bool) -> None:
        """is_short: the warm start is left short, and the score says nothing."""
        self.folder = folder
        self.num_starts = 1
        given = {
            "run.name": folder.name,
            "run.dir": folder.parent,
            "run.max_steps": 1_000_000,
            "run.seed": seed,
            "learner.checkpoint_every_steps": 5,
            "learner.groups_per_step": GROUPS_PER_STEP,
            "rollout.group_size": GROUP_SIZE,
            "rollout.num_servers": 2,
            "eval.every_steps": 50,
            **({"policy.warm_start.max_steps": 6} if is_short else {}),
        }
        parts = [part for key, value in given.items() for part in (f"--{key}", str(value))]
        self._command = [sys.executable, "-m", "learner.run", *parts]
        self.process = subprocess.Popen(self._command)

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def step(self) -> int:
        lines = self.lines()
        return int(lines[-1]["step"]) if lines else 0

    def lines(self) -> list[Line]:
        """Return what metrics.jsonl has of each step that was trained."""
        return read_lines(self.folder / "metrics.jsonl")

    def await_first_step(self) -> None:
        """Raises: RuntimeError when the command ends before; TimeoutError after 15 minutes."""
        until = time.monotonic() + _FIRST_STEP_S
        while not self.lines():
            if self.has_ended:
                raise RuntimeError(f"the run ended with {self.process.returncode} before its first step")
            if time.monotonic() > until:
                raise TimeoutError(f"no step within {_FIRST_STEP_S:g} s")
            time.sleep(_POLL_S)

    def start_again(self) -> None:
        """Have the cluster whole, and give the command again."""
        self.num_starts += 1
        subprocess.run([sys.executable, "-m", "deploy.cluster", "start"], check=False, stdout=subprocess.DEVNULL)
        self.process = subprocess.Popen(self._command)

    def end(self) -> None:
        """End the command as a user would, if it still runs."""
        if not self.has_ended:
            self.process.terminate()
            self.process.wait(_END_S)
