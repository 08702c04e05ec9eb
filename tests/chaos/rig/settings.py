"""A rigged run's settings, its prompts and its reward service."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq

from protocol.node.home import Keys, write_secret
from protocol.settings.settings import Settings
from protocol.wire.channel import KeyPair

# A reward that only the right response gives: its number of a's, and nothing that a default could be taken for.
_SCORER = """
def reward_func(queries, prompts, labels, **kwargs):
    return [query.count("a") + 0.5 for query in queries]
"""


@contextmanager
def reward_service(folder: Path) -> Iterator[str]:
    """Yield the address of a reward service in a process of its own."""
    scorer = folder / "scorer.py"
    scorer.write_text(_SCORER)
    process = subprocess.Popen(
        [sys.executable, "-m", "rewards.serve", "--function", str(scorer), "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().rpartition(" ")[2].strip()
    finally:
        process.terminate()
        process.wait(10.0)


def rig_settings(
    folder: Path,
    reward_url: str,
    *,
    num_prompts: int,
    epochs: int,
    seed: int,
    learner: dict[str, Any],
    rollout: dict[str, Any],
    filters: dict[str, Any] | None = None,
) -> Settings:
    """Return a run over `epochs` epochs of `num_prompts` new prompts; the steps are as many as that needs.

    filters: the section `filter`. What it replaces comes from later epochs.
    """
    prompts = folder / "prompts.jsonl"
    _write_prompts(prompts, num_prompts, seed)
    groups_per_step = learner["groups_per_step"]
    assert num_prompts * epochs % groups_per_step == 0
    return Settings.model_validate(
        {
            "run": {
                "name": "run",
                "dir": str(folder / "runs"),
                "seed": seed,
                "max_steps": num_prompts * epochs // groups_per_step,
            },
            "policy": {"model": "none", "dtype": "float32"},
            "data": {"train": str(prompts)},
            "rollout": {"max_response_tokens": 400, "max_context_tokens": 1000, "max_groups_in_flight": 32, **rollout},
            "rewards": {"endpoints": [{"name": "count", "url": reward_url, "batch_size": 8}]},
            "learner": {"checkpoint_every_steps": 5, "keep_checkpoints": 2, **learner},
            "filter": filters or {},
            "eval": {"every_steps": 0},
        }
    )


def endless_settings(folder: Path, reward_url: str, seed: int) -> Settings:
    """Return a run of so many prompts that it ends only when it is told to."""
    return rig_settings(
        folder,
        reward_url,
        num_prompts=60_000,
        epochs=1,
        seed=seed,
        learner={"groups_per_step": 20, "max_staleness": 2, "checkpoint_every_steps": 50},
        rollout={"group_size": 4},
    )


def _write_prompts(path: Path, num_prompts: int, seed: int) -> None:
    """Write prompts of several lengths, each with a label."""
    draw = random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        for number in range(num_prompts):
            text = f"prompt {number}: " + "x" * draw.randrange(1, 40)
            file.write(json.dumps({"prompt": text, "label": str(number)}) + "\n")


@contextmanager
def rig_home(folder: Path) -> Iterator[Keys]:
    """Yield CURVE keys that lie in a home of their own, as deploy/start_cluster.sh makes them."""
    keys = Keys(KeyPair(*zmq.curve_keypair()), KeyPair(*zmq.curve_keypair()))
    home = folder / "home"
    for name, pair in zip(("coordinator", "peer"), keys, strict=True):
        write_secret(home / "keys" / f"{name}.pub", pair.public.decode())
        write_secret(home / "keys" / f"{name}.sec", pair.secret.decode())
    before = os.environ.get("SLUICE_HOME")
    os.environ["SLUICE_HOME"] = str(home)
    try:
        yield keys
    finally:
        if before is None:
            del os.environ["SLUICE_HOME"]
        else:
            os.environ["SLUICE_HOME"] = before
