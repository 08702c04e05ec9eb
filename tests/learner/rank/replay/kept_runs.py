"""Runs that keep their steps, and the same steps replayed; run by test_replay: `python kept_runs.py FOLDER`.

Each of CASES takes three steps on its ranks and saves a checkpoint after the first; a fourth step crashes. Other ranks
then replay every step, through the same `replay` as the command's: the first from the run's first models, the others
from the checkpoint.
Rank 0 writes to FOLDER/NAME.pt the recorded and the replayed outcome of each step.
"""

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch.distributed as dist

from learner.checkpoint.sealed_files import Report
from learner.models.training.deepspeed_config import import_deepspeed
from learner.objectives.policy_gradient import StepOutcome
from learner.rank.checkpoint import CheckpointWriter
from learner.rank.replay.command import figures_of, plan_replay
from learner.rank.replay.kept_steps import FOLDER, KeptSteps, kept_steps, read_outcome
from learner.rank.replay.ranks import replay
from learner.rank.solo_work import SoloWork
from protocol.errors import OperatorError
from protocol.wire.messages import Batch
from tests.fakes.tiny_models import make_tiny_model
from tests.learner.models.forked_world import run_world
from tests.textbook.loop_rank import make_groups, make_rows, settings_of
from tests.textbook.sluice_side import SluiceSide

NUM_STEPS, SAVED = 3, 1
NOISY_LOSS = """
import torch
def noisy(logprobs, old, advantages, counts, clip):
    return -advantages * logprobs * torch.rand(len(logprobs)), torch.zeros_like(logprobs, dtype=torch.bool)
"""
# Number of ranks, and changes of the textbook's settings.
CASES: dict[str, tuple[int, dict[str, dict[str, Any]]]] = {
    "grpo": (1, {"rewards": {"normalize": True, "clip": 100.0}}),
    "ppo": (1, {"reference": {"refresh_every_steps": 3}}),  # critic, adaptive KL, several updates
    "lora": (1, {"policy": {"lora": {"rank": 4, "alpha": 8.0}}, "kl": {"coefficient": 0.1}}),
    "two ranks": (2, {"learner": {"zero_stage": 3, "micro_batch_tokens": 40}}),
    "dpo": (1, {"learner": {"micro_batch_tokens": 40}}),
    "noisy": (1, {"learner": {"keep_batches": 3}}),  # a user's loss with random numbers
}
_TEXTBOOK = {"lora": "grpo", "two ranks": "grpo", "noisy": "grpo"}


class _Alone(SoloWork):
    """Rank 0's own work, and a coordinator that copies its ledger."""

    def save_ledger(self, path: Path, step: int, report: Report) -> None:
        path.write_bytes(b"ledger")


class _Crash:
    """An objective that fails in every step."""

    def take_step(self, batch: Batch, trajectories: Any, policy_version: int) -> StepOutcome:
        raise RuntimeError("crash")


def train(folder: Path, name: str) -> dict[str, Any]:
    """Take the steps of a case with its batches kept; one more crashes. Returns the error of a disk that refuses."""
    run, model, kind = folder / name, folder / "model", _TEXTBOOK.get(name, name)
    changes = {section: dict(values) for section, values in CASES[name][1].items()}
    changes["learner"] = {"keep_batches": 9, **changes.get("learner", {})}
    if name == "noisy":
        changes["learner"]["loss"] = f"{folder / 'noisy.py'}:noisy"
    settings = settings_of(model, kind, **changes)
    learner, digests = SluiceSide(settings, model), [""]
    learner._objective = KeptSteps(learner._objective, settings, run, lambda: digests[-1])
    disk = _Alone(dist.distributed_c10d._get_default_store(), dist.get_rank(), 60.0)
    writer = CheckpointWriter(learner.roles, cast(Any, disk), disk, run, model, keep=9, evals=settings.eval)
    rng = np.random.default_rng(5)
    groups = partial(make_rows, rng, kind) if kind == "dpo" else partial(make_groups, rng, 4)
    for number in range(1, NUM_STEPS + 1):
        digests.append(learner.roles.policy.pushed_digest())
        learner.step(number, groups())
        if number == SAVED:
            writer.save(number, number)
    learner._objective = KeptSteps(_Crash(), settings, run, lambda: "")
    with suppress(RuntimeError):
        learner.step(NUM_STEPS + 1, groups())
    learner._objective = KeptSteps(_Crash(), settings, folder / "noisy.py", lambda: "")
    try:
        learner.step(NUM_STEPS + 2, groups())
    except OperatorError as error:
        return {"refusal": str(error)}
    return {}


def replay_all(folder: Path, name: str) -> dict[str, Any]:
    """Replay each kept step of a case; returns the recorded and the replayed figures by step."""
    found, scratch = {}, folder / f"scratch of {name}, rank {dist.get_rank()}"
    scratch.mkdir()
    for step in kept_steps(folder / name / FOLDER):
        job = plan_replay(folder / name, step, [], scratch)
        recorded, replayed = read_outcome(job.steps[-1]), replay(job)
        found[step] = {
            "recorded": recorded and recorded.metrics,
            "figures": [asdict(figure) for figure in figures_of(recorded, replayed)],
            "is_equal": all(figure.is_equal for figure in figures_of(recorded, replayed)),
            "has_served_weights": replayed.has_served_weights,
            "from": job.checkpoint.step if job.checkpoint else 0,
        }
    return found


def main(arguments: Sequence[str]) -> None:
    folder = Path(arguments[0])
    import_deepspeed()
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401  # once, not once a rank

    make_tiny_model(folder / "model", tied=True, hidden_size=32, num_layers=1)
    (folder / "noisy.py").write_text(NOISY_LOSS)
    for name, (num_ranks, _) in CASES.items():
        run_world(num_ranks, folder, f"trained {name}", partial(train, name=name))
        run_world(num_ranks, folder, name, partial(replay_all, name=name))


if __name__ == "__main__":
    main(sys.argv[1:])
