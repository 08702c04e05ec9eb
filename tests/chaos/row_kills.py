"""Runs on rows whose ranks, coordinator and command are killed end with the weights of undisturbed ones.

    python -m tests.chaos.row_kills [--seed N] [--short] [--kills N]

Fine-tuning and DPO on a cluster of its own: 40 steps, a checkpoint every third, --kills SIGKILLs in each at any moment,
those of starts included; a command that ends is given again. Fine-tuning has one rank, and its weights are the same bit
for bit; DPO has two, and its weights agree to 1e-6. Both pass the audit. `--short`: fine-tuning alone, three kills.
"""

import json
import math
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file

from learner import audit
from tests.chaos.rig.verdict import conclude, options
from tests.flow.flow_cluster import FlowCluster, Run
from tests.flow.user_run import Bring, Left, bring

_NUM_ROWS = 8
_KINDS = ("rank", "coordinator", "command", "rank", "coordinator")  # a command needs the longest to come back
_LIMIT_S = 1200.0  # of a run between two kills, on busy cores
# Objective -> its ranks, and the largest difference of a weight.
_OBJECTIVES = {"sft": (1, 0.0), "dpo": (2, 1e-6)}


@dataclass
class Killer:
    """Kills a part of a run at each of num_kills moments, spread over its steps."""

    draw: random.Random
    num_steps: int
    num_kills: int
    killed: Counter[str] = field(default_factory=Counter)

    def run(self, cluster: FlowCluster, arguments: list[str], left: Left) -> None:
        """Give the command until it ends well. Raises: AssertionError when it fails without a kill."""
        # The last steps are left alone, so that every kill is met by a run that has work left.
        due = sorted((self.draw.uniform(0.0, 0.8 * self.num_steps) for _ in range(self.num_kills)), reverse=True)
        kinds = [_KINDS[i % len(_KINDS)] for i in range(self.num_kills)]
        self.draw.shuffle(kinds)
        while True:
            num_due = len(due)
            with cluster.running(*arguments) as run:
                while due and self._has_come(run, left, due[-1]) and self._kill(cluster, run, kinds[-1]):
                    due.pop()
                    kinds.pop()
                ended = run.finished(_LIMIT_S)
            if ended.returncode == 0:
                return
            # A death during a start ends the command, and so does its own.
            assert len(due) < num_due, ended.stdout + ended.stderr

    def _has_come(self, run: Run, left: Left, step: float) -> bool:
        """Wait for the moment of a kill; returns False when the run has ended before."""
        # Every fifth kill may meet a start, the others a step.
        limit_s = self.draw.uniform(0.0, 15.0) if self.draw.random() < 0.2 else math.inf
        until = time.monotonic() + limit_s
        while run.process.poll() is None and left.last_step < step and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(self.draw.uniform(0.0, 0.1))
        return run.process.poll() is None

    def _kill(self, cluster: FlowCluster, run: Run, kind: str) -> bool:
        """Kill a process of this kind as soon as there is one; returns False when the run has ended before."""
        while run.process.poll() is None:
            victims = [psutil.Process(run.process.pid)] if kind == "command" else _parts(cluster, kind)
            if victims:
                self.draw.choice(victims).kill()
                self.killed[kind] += 1
                print(f"row_kills: {self.killed.total()} of {self.num_kills}: {kind}", flush=True)
                return True
            time.sleep(0.05)
        return False


def rows_of(user: Bring, objective: str) -> dict[str, object]:
    """Return the settings of a run that learns from rows, which are now in the user's folder: two in a step."""
    rows = user.folder / f"{objective}_rows.jsonl"
    answers = ["completion"] if objective == "sft" else ["chosen", "rejected"]
    texts = [
        {"prompt": f"{i} + 1 =", **{name: f" {i + 1 + 2 * k}" for k, name in enumerate(answers)}}
        for i in range(_NUM_ROWS)
    ]
    rows.write_text("".join(json.dumps(row) + "\n" for row in texts), encoding="utf-8")
    return {
        "objective": objective, "data.train": str(rows), "data.eval": "",
        "rollout.group_size": len(answers), "rewards.endpoints": [], "learner.checkpoint_every_steps": 3,
    }  # fmt: skip


def largest_difference(one: Left, other: Left) -> float:
    """Return the largest difference of a weight in the last checkpoints of two runs."""
    first, second = (_weights(left) for left in (one, other))
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def _weights(left: Left) -> Mapping[str, torch.Tensor]:
    files = sorted((left.folder / "checkpoints" / "latest" / "model").glob("*.safetensors"))
    return {name: each.double() for path in files for name, each in load_file(path).items()}


def _parts(cluster: FlowCluster, kind: str) -> list[psutil.Process]:
    return cluster.ranks() if kind == "rank" else cluster.actors("CoordinatorProcess")


def main() -> int:
    arguments = options(__doc__ or "", kills=15)
    num_steps, num_kills = (12, 3) if arguments.short else (40, arguments.kills)
    draw, killed, holds = random.Random(arguments.seed), Counter[str](), True
    figures: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as name:
        user = bring(Path(name), "http://127.0.0.1:9")
        cluster = FlowCluster(Path(name))
        try:
            assert (started := cluster.start()).returncode == 0, started.stderr
            for objective, (num_ranks, limit) in list(_OBJECTIVES.items())[: 1 if arguments.short else None]:
                given = {
                    **rows_of(user, objective), "run.max_steps": num_steps, "learner.num_ranks": num_ranks,
                    "run.max_restarts": num_kills,
                }  # fmt: skip
                whole = cluster.run(*user.options(f"{objective}_whole", given), timeout_s=_LIMIT_S)
                assert whole.returncode == 0, whole.stdout + whole.stderr
                killer = Killer(draw, num_steps, num_kills)
                left = user.left(f"{objective}_killed")
                killer.run(cluster, user.options(left.folder.name, given), left)
                difference = largest_difference(user.left(f"{objective}_whole"), left)
                steps = [line["step"] for line in left.metrics]
                audited = audit.main([str(left.folder)]) == 0
                is_right = steps == list(range(1, num_steps + 1)) and difference <= limit and audited
                holds = holds and is_right and killer.killed.total() == num_kills
                killed += killer.killed
                print(f"row_kills: {objective} difference={difference:.3g} audited={audited}", flush=True)
                figures |= {f"{objective}_difference": difference, f"{objective}_audit": "passed" if audited else "no"}
        finally:
            cluster.stop()
    return conclude("row_kills", holds, **{f"killed_{kind}": killed[kind] for kind in sorted(killed)}, **figures)


if __name__ == "__main__":
    sys.exit(main())
