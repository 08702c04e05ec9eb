"""A rigged run's settings and its reward service."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from protocol.settings import Settings
from tests.chaos.rig import write_prompts

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
) -> Settings:
    """Return a run over `epochs` epochs of `num_prompts` new prompts; the steps are as many as that needs."""
    prompts = folder / "prompts.jsonl"
    write_prompts(prompts, num_prompts, seed)
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
            "eval": {"every_steps": 0},
        }
    )
