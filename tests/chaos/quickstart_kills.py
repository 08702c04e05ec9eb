"""The quick start itself, on real vLLM and DeepSpeed, with five kills of each kind: it ends, adds up and learns.

    deploy/start_cluster.sh && .venv/bin/python -m tests.chaos.quickstart_kills [--seed N] [--short]

One `python -m learner.run` with a checkpoint every fourth step. Between its steps five SIGKILLs each hit a rollout
server (every other time its vLLM engine process), the coordinator and the learner rank, in an order that is drawn. It
must exit with 0, pass `learner.audit`, give up no prompt, and reach what the quick start must reach without kills:
eval_reward 0.85, greedy 0.9. `--short`: one kill of each kind in 12 steps, without the scores. Not part of CI: minutes.
"""

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from deploy.cluster.ray_processes import ray_processes
from deploy.node.home import this_home
from learner import audit
from tests.chaos.rig.given_up import num_given_up
from tests.chaos.rig.verdict import conclude, options
from tests.fakes.process_facts import has_open, title_of

_KINDS = ("server", "coordinator", "rank")
_MIN_REWARD, _MIN_GREEDY = 0.85, 0.9
_STALL_S = 900.0


def main() -> int:
    arguments = options(__doc__)
    per_kind, num_steps = (1, 12) if arguments.short else (5, 60)
    draw = random.Random(arguments.seed)
    kinds = [kind for kind in _KINDS for _ in range(per_kind)]
    draw.shuffle(kinds)
    last = num_steps - 4
    steps = sorted(draw.uniform(2, last) for _ in kinds)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        run = QuickstartRun(folder, num_steps, arguments.seed)
        try:
            for number, (step, kind) in enumerate(zip(steps, kinds, strict=True)):
                run.wait(lambda step=step: run.step >= int(step))  # type: ignore[misc]
                run.wait(lambda kind=kind, number=number: _kill(kind, number, folder))  # type: ignore[misc]
                print(f"quickstart_kills: killed a {kind} at step {run.step}", flush=True)
                time.sleep(3.0)  # what dies is noticed within 2 s
            run.wait(lambda: run.process.poll() is not None)
        finally:
            run.end()
        lines = run.lines()
        has_audit_passed, given_up = audit.main([str(folder)]) == 0, num_given_up(folder)
    final = {key: lines[-1].get(key, 0.0) for key in ("eval_reward", "eval_reward_greedy")}
    is_good = arguments.short or (final["eval_reward"] >= _MIN_REWARD and final["eval_reward_greedy"] >= _MIN_GREEDY)
    return conclude(
        "quickstart_kills",
        run.process.returncode == 0 and has_audit_passed and not given_up and is_good,
        kills=len(kinds),
        exit_status=run.process.returncode,
        steps=lines[-1]["step"],
        given_up=given_up,
        **final,
        seconds=time.monotonic() - run.begun,
        audit="passed" if has_audit_passed else "failed",
    )


class QuickstartRun:
    """The command under way."""

    def __init__(self, folder: Path, num_steps: int, seed: int) -> None:
        self.begun = time.monotonic()
        self._metrics = folder / "metrics.jsonl"
        given = {
            "run.name": folder.name,
            "run.dir": folder.parent,
            "run.max_steps": num_steps,
            "run.seed": seed,
            "learner.checkpoint_every_steps": 4,
        }
        parts = [part for key, value in given.items() for part in (f"--{key}", str(value))]
        self.process = subprocess.Popen([sys.executable, "-m", "learner.run", *parts])

    def end(self) -> None:
        """End the command as a user would, if it still runs."""
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60.0)

    @property
    def step(self) -> int:
        lines = self.lines()
        return int(lines[-1]["step"]) if lines else -1

    def lines(self) -> list[dict[str, float]]:
        if not self._metrics.exists():
            return []
        whole = [line for line in self._metrics.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return [json.loads(line) for line in whole]

    def wait(self, is_so: Callable[[], bool]) -> None:
        """Return when it is so. Raises: TimeoutError when no step ends for minutes; RuntimeError when the run ended."""
        seen, until = self.step, time.monotonic() + _STALL_S
        while not is_so():
            if self.step != seen:
                seen, until = self.step, time.monotonic() + _STALL_S
            if time.monotonic() > until:
                raise TimeoutError(f"nothing moved for {_STALL_S:g} s at step {seen}")
            if self.process.poll() is not None:
                raise RuntimeError(f"the run ended with {self.process.returncode} at step {seen}")
            time.sleep(0.1)


def _kill(kind: str, number: int, folder: Path) -> bool:
    """Kill a process of this kind; False when there is none now."""
    processes = ray_processes(this_home())
    if kind == "server":
        title = "VLLM::EngineCore" if number % 2 else "ray::RolloutServer"
        found = [process for process in processes if title_of(process).startswith(title)]
    elif kind == "coordinator":
        found = [process for process in processes if title_of(process).startswith("ray::CoordinatorProcess")]
    else:
        found = [process for process in processes if has_open(process, f"{folder}/logs/rank_")]
    if not found:
        return False
    found[0].kill()
    return True


if __name__ == "__main__":
    sys.exit(main())
