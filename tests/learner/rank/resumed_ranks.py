"""Runs that go on with other ranks and other ZeRO stages, run by test_resumed_ranks: `python resumed_ranks.py FOLDER`.

Each of WRITERS takes a step, saves, and takes two more; each of READERS takes the last two from every state of its
kind. A step is PPO's with a critic, several updates, an adaptive KL in the reward and normalised rewards. Rank 0 of
each world writes what it found to FOLDER/NAME.pt: weights by role, what is remembered, and what the reference says.
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

from learner.coordinator.groups.group import Group
from learner.coordinator.steps.step_batch import build_step
from learner.data.prompts import Prompt
from learner.models.micro_batch import make_micro_batch
from learner.models.reference import BaseReference
from learner.models.training.deepspeed_config import import_deepspeed
from learner.models.world import reduce_tensor
from learner.objectives.policy_gradient import PolicyGradient, StepOutcome
from learner.rank.start import load_roles
from protocol.settings.settings import Settings
from protocol.wire.trajectory import Trajectory, VersionSpan
from tests.learner.models.forked_world import run_world
from tests.learner.models.small_policy import trajectories
from tests.protocol.wire.examples import example_facts

_LORA = {"rank": 4, "alpha": 8.0}
# ranks, ZeRO stage of the policy, of the critic, adapters of the policy
Case = tuple[int, int, int, dict[str, Any]]
WRITERS: dict[str, Case] = {"whole 1": (1, 0, 3, {}), "whole 2": (2, 3, 2, {}), "lora 2": (2, 3, 0, _LORA)}
READERS: dict[str, Case] = {
    "whole by 1": (1, 2, 0, {}),
    "whole by 3": (3, 2, 3, {}),
    "lora by 3": (3, 3, 1, _LORA),
}
_VOCAB = 272


class Run:
    """A run's models on this rank, and the steps that they take."""

    def __init__(self, folder: Path, case: Case) -> None:
        num_ranks, stage, critic_stage, lora = case
        sections = {
            "run": {"max_steps": 4},
            "policy": {"model": str(folder / "model"), "dtype": "float32", "lora": lora},
            "learner": {
                "recipe": "ppo",
                "num_ranks": num_ranks,
                "zero_stage": stage,
                "groups_per_step": 6,
                "num_mini_batches": 2,
                "num_epochs": 2,
                "micro_batch_tokens": 80,
                "lr": 1e-4,
            },
            "critic": {"zero_stage": critic_stage, "lr": 1e-4},
            "kl": {"coefficient": 0.05, "target": 0.001, "horizon": 40.0},
            "rewards": {"normalize": True},
            "rollout": {"group_size": 2},
        }
        self.settings = Settings.model_validate(sections)
        self.roles = load_roles(self.settings, {"policy.model": folder / "model"}, None, lambda phase: None)
        assert isinstance(self.roles.reference, BaseReference) == bool(lora)
        self._objective = PolicyGradient(self.roles, self.settings, reduce_tensor)

    def steps(self, *numbers: int) -> None:
        for number in numbers:
            assert step_of(self._objective, self.settings, number).applied

    def found(self) -> dict[str, Any]:
        weights: dict[str, dict[str, Tensor]] = {}
        for role, model in (("policy", self.roles.policy), ("critic", self.roles.critic)):
            assert model is not None
            for name, weight in model.weights():
                with model.gather([weight]):
                    weights.setdefault(role, {})[name] = weight.detach().clone()
        reference, micro_batch = self.roles.reference, make_micro_batch(trajectories())
        assert reference is not None
        with reference.in_use():
            of_reference = reference.logprobs(micro_batch)
        return {"weights": weights, "memory": dict(self.roles.memory), "reference": of_reference}


def evaluate(folder: Path) -> dict[str, Any]:
    """Load a run without steps in ZeRO 3; return whether it has other roles or an optimizer, and what a push sends."""
    sections = {
        "run": {"max_steps": 0},
        "policy": {"model": str(folder / "model"), "dtype": "bfloat16"},
        "learner": {"recipe": "ppo", "zero_stage": 3, "num_ranks": 2},
        "kl": {"coefficient": 0.05},
    }
    settings = Settings.model_validate(sections)
    roles = load_roles(settings, {"policy.model": folder / "model"}, None, lambda phase: None)
    roles.policy.check_finite()
    return {
        "others": [roles.critic, roles.reference],
        "optimizer": getattr(roles.policy._engine.optimizer, "optimizer", None),
        "num_logprobs": len(roles.policy.logprobs(make_micro_batch(trajectories()))),
        "digest": roles.policy.pushed_digest(),
    }


def step_of(objective: PolicyGradient, settings: Settings, number: int) -> StepOutcome:
    """Take a step of six groups on this rank; return its outcome."""
    groups = groups_of(number)
    share, _ = build_step(number, number - 1, groups, settings.learner).share_of(dist.get_rank(), "r", 1, 1)
    made = [group.trajectories[index] for group in groups for index in sorted(group.trajectories)]
    own = {index: made[index] for part in share.micro_batches for index in part}
    return objective.take_step(share, own, number - 1)


def groups_of(step: int) -> list[Group]:
    """Return a step's six groups of two random trajectories of two turns each."""
    rng = np.random.default_rng(step)
    groups = []
    for number in range(6):
        group = Group(f"g{number}", Prompt(f"g{number}", "?", "A", {}), "train", 0, 0, 2)
        for index in range(2):
            group.receive(_trajectory(rng, f"g{number}", index, step - 1))
        groups.append(group)
    return groups


def _trajectory(rng: np.random.Generator, group: str, index: int, version: int) -> Trajectory:
    first, second = int(rng.integers(1, 12)), int(rng.integers(1, 6))
    mask = np.array([0, 0] + [1] * first + [0, 0] + [1] * second, np.uint8)
    tokens = rng.integers(0, _VOCAB, len(mask)).astype(np.int32)
    behaviour = np.where(mask, rng.normal(-6.0, 0.3, len(mask)), 0.0).astype(np.float32)
    facts = example_facts(
        group=group,
        sample_index=index,
        reward=float(rng.normal()),
        num_tokens=len(mask),
        num_prompt_tokens=2,
        version_spans=[VersionSpan(2, 2 + first, version), VersionSpan(4 + first, len(mask), version)],
    )
    return Trajectory(facts, tokens, behaviour, mask)


def write(name: str, folder: Path) -> dict[str, Any]:
    run = Run(folder, WRITERS[name])
    run.steps(1)
    run.roles.save_state(folder / f"state {name}")
    run.steps(2, 3)
    return run.found()


def read(name: str, folder: Path) -> dict[str, Any]:
    """Return what each writer of this kind left, two steps on."""
    run, kind = Run(folder, READERS[name]), name.split()[0]
    found = {}
    for writer in (writer for writer in WRITERS if writer.split()[0] == kind):
        run.roles.load_state(folder / f"state {writer}")
        run.steps(2, 3)
        found[writer] = run.found()
    return found


def main(arguments: Sequence[str]) -> None:
    folder = Path(arguments[0])
    import_deepspeed()
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401  # once, not once a rank

    run_world(2, folder, "evaluated", evaluate)
    for name, case in WRITERS.items():
        run_world(case[0], folder, name, partial(write, name))
    for name, case in READERS.items():
        run_world(case[0], folder, name, partial(read, name))


if __name__ == "__main__":
    main(sys.argv[1:])
