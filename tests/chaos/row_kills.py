"""Commands on rows and answers whose processes are killed leave what undisturbed ones leave.

    python -m tests.chaos.row_kills [--seed N] [--short] [--kills N] [--parts sft,dpo,generate,iterate]

On a cluster of its own, --kills SIGKILLs in each of four parts at any moment, those of starts included; a command that
ends is given again. Fine-tuning has one rank, and its weights are those of an undisturbed run bit for bit. DPO has two,
and its weights agree to 1e-6; both pass the audit. The file of `sluice generate` has every row once, in order, with all
samples. Each of the two rounds of `sluice iterate` has such a file, the rows that `sluice select` makes of it, and the
weights, to 1e-6, of an undisturbed DPO run on these rows. --short: fine-tuning alone, three kills.
"""

import json
import math
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import yaml
from safetensors.torch import load_file

from learner import audit
from learner.data.answers import read_answers
from tests.chaos.rig.verdict import conclude, options
from tests.fakes.http_servers import scripted_server
from tests.flow.flow_cluster import FlowCluster, Run
from tests.flow.user_run import SETTINGS, Bring, Left, bring, score

_NUM_ROWS = 8
_NUM_PROMPTS, _NUM_SAMPLES, _NUM_ROUNDS = 1500, 2, 2
_LIMIT_S = 1200.0  # of a command between two kills, on busy cores
# A command needs the longest to come back.
_TRAINING = ("rank", "coordinator", "command", "rank", "coordinator")
_SAMPLING = ("server", "coordinator", "command", "rank", "coordinator")
# Objective -> its ranks, and the largest difference of a weight.
_OBJECTIVES = {"sft": (1, 0.0), "dpo": (2, 1e-6)}


@dataclass(frozen=True)
class Part:
    """A command to kill. progress: how far it is, 0 to 1."""

    module: str
    arguments: list[str]
    progress: Callable[[], float]
    kinds: tuple[str, ...]


class Killer:
    """Kills a part of a command at each of num_kills moments, spread over its progress."""

    def __init__(self, cluster: FlowCluster, draw: random.Random, num_kills: int) -> None:
        self._cluster, self._draw, self._num_kills = cluster, draw, num_kills
        self.killed = Counter[str]()

    def run(self, part: Part) -> None:
        """Give the command until it ends well. Raises: AssertionError when it fails without a kill."""
        # The last fifth is left alone, so that every kill is met by a command that has work left.
        due = sorted((self._draw.uniform(0.0, 0.8) for _ in range(self._num_kills)), reverse=True)
        kinds = [part.kinds[i % len(part.kinds)] for i in range(self._num_kills)]
        self._draw.shuffle(kinds)
        while True:
            num_due = len(due)
            with self._cluster.running(*part.arguments, module=part.module) as run:
                while due and self._has_come(run, part, due[-1]) and self._kill(run, kinds[-1]):
                    due.pop()
                    kinds.pop()
                ended = run.finished(_LIMIT_S)
            if ended.returncode == 0:
                assert not due, f"{len(due)} kills met no process: " + ended.stdout + ended.stderr
                return
            # A death during a start ends the command, and so does its own.
            assert len(due) < num_due, ended.stdout + ended.stderr

    def _has_come(self, run: Run, part: Part, moment: float) -> bool:
        """Wait for the moment of a kill; returns False when the command has ended before."""
        # Every fifth kill may meet a start, the others a step or a sample.
        limit_s = self._draw.uniform(0.0, 15.0) if self._draw.random() < 0.2 else math.inf
        until = time.monotonic() + limit_s
        while run.process.poll() is None and part.progress() < moment and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(self._draw.uniform(0.0, 0.1))
        return run.process.poll() is None

    def _kill(self, run: Run, kind: str) -> bool:
        """Kill a process of this kind as soon as there is one; returns False when the command has ended before."""
        while run.process.poll() is None:
            if victims := self._victims(run, kind):
                self._draw.choice(victims).kill()
                self.killed[kind] += 1
                print(f"row_kills: kill {self.killed.total()}: {kind}", flush=True)
                return True
            time.sleep(0.05)
        return False

    def _victims(self, run: Run, kind: str) -> list[psutil.Process]:
        if kind == "command":
            return [psutil.Process(run.process.pid)]
        if kind == "rank":
            return self._cluster.ranks()
        return self._cluster.actors({"coordinator": "CoordinatorProcess", "server": "RolloutServer"}[kind])


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


def check_training(killer: Killer, user: Bring, cluster: FlowCluster, objective: str, num_steps: int) -> float:
    """Return the largest difference of a weight. Raises: AssertionError."""
    num_ranks, limit = _OBJECTIVES[objective]
    given = {
        **rows_of(user, objective), "run.max_steps": num_steps, "learner.num_ranks": num_ranks,
        "run.max_restarts": 20,
    }  # fmt: skip
    whole, left = (user.left(f"{objective}_{name}") for name in ("whole", "killed"))
    _end_well(cluster, "learner.run", user.options(whole.folder.name, given))
    arguments = user.options(left.folder.name, given)
    killer.run(Part("learner.run", arguments, lambda: left.last_step / num_steps, _TRAINING))
    assert [line["step"] for line in left.metrics] == list(range(1, num_steps + 1))
    assert audit.main([str(left.folder)]) == 0
    difference = largest_difference(whole, left)
    assert difference <= limit
    return difference


def check_generation(killer: Killer, user: Bring) -> int:
    """Return the number of rows of answers. Raises: AssertionError."""
    prompts, out = _prompts(user, _NUM_PROMPTS), user.folder / "answers.jsonl"
    arguments = [str(user.model), str(prompts), str(out), "--samples", str(_NUM_SAMPLES)]
    arguments += ["--config", str(_generation(user))]
    killer.run(Part("learner.generation.generate", arguments, lambda: num_lines(out) / _NUM_PROMPTS, _SAMPLING))
    check_answers(out, _NUM_PROMPTS, _NUM_SAMPLES)
    return num_lines(out)


def check_rounds(killer: Killer, user: Bring, cluster: FlowCluster, num_steps: int) -> float:
    """Return the largest difference of a weight in two rounds of iterative DPO. Raises: AssertionError."""
    num = _NUM_PROMPTS // 3
    rounds, arguments = iteration(user, "dpo", num, num_steps)
    arguments += ["--rounds", str(_NUM_ROUNDS)]

    def progress() -> float:
        folders = [rounds / f"round_{number + 1}" for number in range(_NUM_ROUNDS)]
        parts = [num_lines(folder / "answers.jsonl") / num for folder in folders]
        parts += [Left(folder / "train").last_step / num_steps for folder in folders]
        return sum(parts) / len(parts)

    killer.run(Part("learner.generation.iterate", arguments, progress, _SAMPLING))
    model, differences = str(user.model), []
    for number in range(1, _NUM_ROUNDS + 1):
        folder, again = rounds / f"round_{number}", user.left(f"round_{number}")
        check_answers(folder / "answers.jsonl", num, _NUM_SAMPLES)
        rows = user.folder / f"rows_{number}.jsonl"
        selected = [str(folder / "answers.jsonl"), str(rows), "--select", "best_worst"]
        _end_well(cluster, "learner.generation.select", selected)
        assert rows.read_bytes() == (folder / "rows.jsonl").read_bytes()
        own = {"run.name": again.folder.name, "run.dir": again.folder.parent, "policy.model": model, "data.train": rows}
        undisturbed = [part for key, each in own.items() for part in (f"--{key}", str(each))]
        _end_well(cluster, "learner.run", ["--config", str(user.folder / "train.yaml"), *undisturbed])
        differences.append(largest_difference(again, Left(folder / "train")))
        assert audit.main([str(folder / "train")]) == 0
        model = str(folder / "train" / "checkpoints" / "latest" / "model")
    assert max(differences) <= _OBJECTIVES["dpo"][1]
    return max(differences)


def iteration(user: Bring, objective: str, num_prompts: int, num_steps: int) -> tuple[Path, list[str]]:
    """Return the folder of the rounds, and the arguments of `sluice iterate` but for --rounds."""
    training: dict[str, dict[str, object]] = {key: dict(SETTINGS[key]) for key in ("policy", "learner", "run")}
    training["learner"] |= {"groups_per_step": 8, "checkpoint_every_steps": 3}
    training["run"] |= {"max_steps": num_steps, "max_restarts": 20}
    train, rounds = user.folder / "train.yaml", user.folder / f"rounds_{objective}"
    train.write_text(yaml.safe_dump({"objective": objective, **training}), encoding="utf-8")
    select = "best" if objective == "sft" else "best_worst"
    arguments = [str(user.model), str(_prompts(user, num_prompts)), str(rounds), "--samples", str(_NUM_SAMPLES)]
    return rounds, [*arguments, "--select", select, "--generate", str(_generation(user)), "--train", str(train)]


def check_answers(path: Path, num_rows: int, num_samples: int) -> None:
    """Assert that every row is there once, in order, with all its samples."""
    answers = [json.loads(line) for line in path.read_bytes().split(b"\n") if line]
    assert [each["row"] for each in answers] == list(range(num_rows))
    assert [each.row for each in read_answers(path)] == list(range(num_rows))
    assert {(len(each["samples"]), each["failed"]) for each in answers} == {(num_samples, None)}
    assert len({(each["weights"], each["sampled_by"]) for each in answers}) == 1


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def largest_difference(one: Left, other: Left) -> float:
    """Return the largest difference of a weight in the last checkpoints of two runs."""
    first, second = (_weights(left) for left in (one, other))
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def _weights(left: Left) -> Mapping[str, torch.Tensor]:
    files = sorted((left.folder / "checkpoints" / "latest" / "model").glob("*.safetensors"))
    return {name: each.double() for path in files for name, each in load_file(path).items()}


def _prompts(user: Bring, num: int) -> Path:
    path = user.folder / f"{num}_prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i} + {i + 1} ="}) + "\n" for i in range(num)), encoding="utf-8")
    return path


def _generation(user: Bring) -> Path:
    path = user.folder / "generate.yaml"
    rewards = {"endpoints": [{"name": "mine", "url": user.reward_url}]}
    given = {**SETTINGS, "rewards": rewards, "data": {"label_required": False}}
    given["run"] = {**SETTINGS["run"], "max_restarts": 20}
    path.write_text(yaml.safe_dump(given), encoding="utf-8")
    return path


def _end_well(cluster: FlowCluster, module: str, arguments: list[str]) -> None:
    ended = cluster.command(module, *arguments, timeout_s=_LIMIT_S)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def main() -> int:
    arguments = options(__doc__ or "", kills=8, parts="sft,dpo,generate,iterate")
    num_steps, num_kills, parts = (
        (12, 3, ["sft"]) if arguments.short else (40, arguments.kills, arguments.parts.split(","))
    )
    figures: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as name, scripted_server() as rewards:
        user = bring(Path(name), rewards.script_by("fast", score))
        cluster = FlowCluster(Path(name))
        killer = Killer(cluster, random.Random(arguments.seed), num_kills)
        try:
            assert (started := cluster.start()).returncode == 0, started.stderr
            for part in parts:
                if part in _OBJECTIVES:
                    figures[f"{part}_difference"] = check_training(killer, user, cluster, part, num_steps)
                elif part == "generate":
                    figures["rows_generated"] = check_generation(killer, user)
                else:
                    figures["iterate_difference"] = check_rounds(killer, user, cluster, num_steps // 2)
        finally:
            cluster.stop()
    return conclude(
        "row_kills", True, **{f"killed_{kind}": num for kind, num in sorted(killer.killed.items())}, **figures
    )


if __name__ == "__main__":
    sys.exit(main())
