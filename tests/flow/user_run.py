"""A user's own run, for the tests of this room: what they bring, what they give as options, and what the run left.

`Bring.options` are what follows `python -m learner.run`; `Left` reads a run folder back.
"""

import json
import sqlite3
import subprocess
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.fakes.http_servers import Answer, Received
from tests.fakes.tiny_models import make_tiny_model
from tests.flow.flow_cluster import FlowCluster

NUM_PROMPTS = 64
GROUPS_PER_STEP = 2
GROUP_SIZE = 4

# One engine for all runs that share a model folder: none of these may differ between them.
SETTINGS: dict[str, Any] = {
    "policy": {"dtype": "float32"},
    "rollout": {
        "environment": "single_turn",
        "group_size": GROUP_SIZE,
        "max_turns": 2,
        "max_response_tokens": 24,
        "max_observation_tokens": 64,
        "max_context_tokens": 256,
    },
    # Steps so large that a weight that did not travel moves logprobs by far more than 1e-3.
    "learner": {
        "groups_per_step": GROUPS_PER_STEP,
        "max_staleness": 1,
        "lr": 1e-3,
        "lr_schedule": "constant",
        "micro_batch_tokens": 512,
        "checkpoint_every_steps": 0,
    },
    "run": {"max_steps": 3, "seed": 5, "drain_s": 60},
}


@dataclass(frozen=True)
class Bring:
    """What a user has in `folder`: a model of their own, prompts, and a reward service at reward_url."""

    folder: Path
    model: Path
    reward_url: str

    def options(self, name: str, overrides: Mapping[str, object] | None = None) -> list[str]:
        """Return the command's options for the run `name`; the run folder is `folder`/runs/`name`."""
        config = self.folder / "mine.yaml"
        config.write_text(yaml.safe_dump(SETTINGS), encoding="utf-8")
        given = {
            "run.name": name,
            "run.dir": str(self.folder / "runs"),
            "policy.model": str(self.model),
            "data.train": str(self.folder / "prompts.jsonl"),
            "data.eval": str(self.folder / "held_out.jsonl"),
            "rewards.endpoints": [{"name": "mine", "url": self.reward_url}],
            **(overrides or {}),
        }
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in given.items()}
        return ["--config", str(config), *(part for key, text in texts.items() for part in (f"--{key}", text))]

    def left(self, name: str) -> "Left":
        return Left(self.folder / "runs" / name)


def bring(folder: Path, reward_url: str, *, tied: bool = True) -> Bring:
    """Return what a user brings, now written into `folder`."""
    model = make_tiny_model(folder / ("tied" if tied else "untied"), tied=tied)
    for name, count in (("prompts.jsonl", NUM_PROMPTS), ("held_out.jsonl", 4)):
        rows = [{"prompt": f"{name[0]}{i} + {i + 1} =", "label": str(2 * i + 1)} for i in range(count)]
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return Bring(folder, model, reward_url)


def score(received: Received) -> Answer:
    """Answer as a reward service of OpenRLHF's contract does: a reward in [0, 1) that depends on the text."""
    return Answer({"rewards": [sum(query.encode()) % 11 / 11 for query in received.body["query"]]})


def score_slowly(received: Received) -> Answer:
    """The same after a while, so that a step takes long enough to be met in the middle."""
    return Answer(score(received).body, delay_s=0.4)


@dataclass(frozen=True)
class Left:
    """What a run left in its folder."""

    folder: Path

    @property
    def metrics(self) -> list[dict[str, float]]:
        """Return the lines of metrics.jsonl; none while there is no such file."""
        return self._lines("metrics.jsonl")

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Return the lines of samples.jsonl."""
        return self._lines("samples.jsonl")

    @property
    def last_step(self) -> int:
        return int(max((line["step"] for line in self.metrics), default=0))

    @property
    def newest_checkpoint(self) -> int:
        """Return the step of the newest checkpoint, 0 without one."""
        folders = (self.folder / "checkpoints").glob("step_*")
        return max((int(folder.name.removeprefix("step_")) for folder in folders), default=0)

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """Return what an SQL query of the ledger gives."""
        with closing(sqlite3.connect(f"file:{self.folder / 'ledger.sqlite'}?mode=ro", uri=True)) as ledger:
            return ledger.execute(query).fetchall()

    @property
    def states(self) -> Counter[str]:
        """Return how many prompts are in each state."""
        return Counter(state for (state,) in self.rows("SELECT state FROM prompts"))

    @property
    def trained(self) -> dict[int, tuple[int, int]]:
        """Return for each step (its different prompts, its trajectories)."""
        query = (
            "SELECT p.step, COUNT(DISTINCT p.uid), COUNT(*) FROM prompts p JOIN trajectories t "
            'ON t."group" = p."group" AND t.step = p.step '
            "WHERE p.state = 'trained' GROUP BY p.step"
        )
        return {step: (prompts, trajectories) for step, prompts, trajectories in self.rows(query)}

    @property
    def most_often_trained(self) -> int:
        """Return the largest number of steps that one prompt is in."""
        query = "SELECT MAX(n) FROM (SELECT COUNT(*) AS n FROM prompts WHERE state = 'trained' GROUP BY uid)"
        return int(self.rows(query)[0][0])

    @property
    def staleness(self) -> list[int]:
        """Return the staleness of every trained trajectory."""
        return [s for (s,) in self.rows("SELECT staleness FROM trajectories WHERE step IS NOT NULL AND kind = 'train'")]

    def _lines(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def each_trained_once(num_steps: int) -> dict[int, tuple[int, int]]:
    """Return what `Left.trained` is when every step had its own prompts, each with all of its samples."""
    return dict.fromkeys(range(1, num_steps + 1), (GROUPS_PER_STEP, GROUPS_PER_STEP * GROUP_SIZE))


@dataclass(frozen=True)
class Ran:
    """A run that ended. started_at: of its command, Unix seconds."""

    command: "subprocess.CompletedProcess[str]"
    left: Left
    started_at: float


def run(cluster: FlowCluster, user: Bring, name: str, **settings: object) -> Ran:
    """Return a run of the user's with these settings, `__` for the dot in their names; it has ended well."""
    overrides = {key.replace("__", "."): value for key, value in settings.items()}
    started_at = time.time()
    command = cluster.run(*user.options(name, overrides))
    assert command.returncode == 0, command.stdout + command.stderr
    return Ran(command, user.left(name), started_at)


def assert_same_weights(ran: Ran) -> None:
    """At staleness 0 behaviour and learner logprobs of the same tokens differ by rounding alone."""
    differences = [line["policy/logprob_difference_max"] for line in ran.left.metrics if line["step"] > 0]
    print(f"largest logprob difference in each step: {differences}")
    assert len(differences) == 3
    assert all(0 <= difference < 1e-3 for difference in differences)
