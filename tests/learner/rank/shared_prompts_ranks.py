"""One step of each objective with shared prompts and without, run by test_shared_prompts: `.. FOLDER`.

Each world writes to FOLDER/NAME.pt the step's metrics and the weights after it, for both values of
learner.share_prompts.
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from learner.coordinator.groups.group import Group
from learner.coordinator.steps.step_batch import build_step
from learner.data.prompts import Prompt
from learner.models.training.deepspeed_config import import_deepspeed
from learner.rank.rank import objective_of
from learner.rank.start import load_roles
from protocol.settings.settings import Settings
from protocol.wire.trajectory import Trajectory, VersionSpan
from tests.learner.models.forked_world import run_world
from tests.protocol.wire.examples import example_facts

_KL = {"coefficient": 0.1}
# ranks, settings
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "grpo with a reference": (1, {"kl": _KL}),
    "grpo in zero 3": (2, {"learner": {"zero_stage": 3}}),
    "ppo with a critic": (1, {"learner": {"recipe": "ppo"}, "kl": {**_KL, "place": "reward"}}),
    "lora": (1, {"policy": {"lora": {"rank": 4}}, "kl": _KL}),
    "dpo": (1, {"objective": "dpo"}),
    "kto": (1, {"objective": "kto"}),
    "sft": (1, {"objective": "sft"}),
    "distill": (1, {"objective": "distill", "reference": {"model": "teacher"}}),
    "reward_model": (1, {"objective": "reward_model"}),
}


def take_step(case: tuple[int, dict[str, Any]], share_prompts: bool, folder: Path) -> dict[str, Any]:
    """Return what a step of four groups leaves on this rank."""
    num_ranks, given = case
    learner = {"lr": 1e-4, "num_ranks": num_ranks, "groups_per_step": 4, "share_prompts": share_prompts}
    policy = {"model": str(folder / "model"), "dtype": "float32", **given.get("policy", {})}
    sections = {"run": {"max_steps": 2}, **given, "policy": policy, "learner": learner | given.get("learner", {})}
    settings = Settings.model_validate(sections)
    models = {"policy.model": folder / "model", "reference.model": folder / "teacher"}
    roles = load_roles(settings, models, None, lambda phase: None)
    is_of_pairs = given.get("objective") in ("dpo", "reward_model")
    groups = [_group(number, 2 if is_of_pairs else 4) for number in range(4)]
    batch = build_step(1, 0, groups, settings.learner, are_whole=is_of_pairs)
    share, _ = batch.share_of(dist.get_rank(), "r", 1, 1)
    own = {index: batch.trajectories[index] for part in share.micro_batches for index in part}
    outcome = objective_of(settings, roles, folder / "model").take_step(share, own, 0)
    weights = {}
    for name, weight in roles.policy.weights():
        with roles.policy.gather([weight]):
            weights[name] = weight.detach().clone()
    computed = roles.policy.take_computed()
    return {"metrics": outcome.metrics, "weights": weights, "applied": outcome.applied, "computed": computed}


def _group(number: int, size: int) -> Group:
    """Return a group of two-turn trajectories with one prompt of 100 tokens."""
    rng = np.random.default_rng(number)
    prompt, group = rng.integers(0, 272, 100), Group(f"g{number}", Prompt("g", "?", "A", {}), "train", 0, 0, size)
    for index in range(size):
        first, second = int(rng.integers(1, 40)), int(rng.integers(1, 20))
        mask = np.array([0] * 100 + [1] * first + [0, 0] + [1] * second, np.uint8)
        tokens = np.concatenate([prompt, rng.integers(0, 272, len(mask) - 100)]).astype(np.int32)
        facts = example_facts(
            group=f"g{number}",
            sample_index=index,
            reward=float(1 - index % 2),
            num_tokens=len(mask),
            num_prompt_tokens=100,
            version_spans=[VersionSpan(100, 100 + first, 0), VersionSpan(102 + first, len(mask), 0)],
        )
        behaviour = np.where(mask, rng.normal(-6.0, 0.3, len(mask)), 0.0).astype(np.float32)
        group.receive(Trajectory(facts, tokens, behaviour, mask))
    return group


def both(case: tuple[int, dict[str, Any]], folder: Path) -> dict[str, Any]:
    return {str(share_prompts): take_step(case, share_prompts, folder) for share_prompts in (True, False)}


def main(arguments: Sequence[str]) -> None:
    folder = Path(arguments[0])
    import_deepspeed()
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401  # once, not once a rank

    for name, case in CASES.items():
        run_world(case[0], folder, name, partial(both, case))


if __name__ == "__main__":
    main(sys.argv[1:])
