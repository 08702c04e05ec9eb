"""The learner's steps on one rank beside the textbook's, and resumed in the middle; run by test_textbook.

python loop_rank.py FOLDER                               writes what it found to FOLDER/found.pt
python loop_rank.py FOLDER RANK WORLD_SIZE PORT STAGE    the first steps at a ZeRO stage: FOLDER/few.pt, of rank 0
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from learner.coordinator.groups.group import Group
from learner.coordinator.steps.step_batch import build_step
from learner.data.prompts import Prompt
from learner.models.critic import CriticEngine
from learner.models.policy import PolicyEngine
from learner.models.reference import ReferenceModel
from learner.models.roles import Roles
from learner.models.settings import PolicySettings
from learner.models.world import free_address, join_world, reduce_tensor
from learner.objectives.policy_gradient import PolicyGradient
from protocol.settings.settings import Settings
from protocol.wire.trajectory import Trajectory, VersionSpan
from tests.learner.objectives import textbook as book
from tests.protocol.wire.examples import example_facts

NUM_STEPS = {"grpo": 50, "ppo": 50}
NUM_FEW = 5
VOCAB = 272
SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {"learner": {"recipe": "grpo", "dual_clip": None}},
    "ppo": {
        "learner": {
            "recipe": "ppo",
            "dual_clip": None,
            "num_mini_batches": book.NUM_MINI_BATCHES,
            "num_epochs": book.NUM_EPOCHS,
            "correction": "none",
        },
        "kl": {"coefficient": book.KL_COEFFICIENT, "target": book.KL_TARGET, "horizon": book.KL_HORIZON},
        "rewards": {"clip": None},
    },
}


class Learner:
    """The learner on one rank; groups come as the coordinator hands them out."""

    def __init__(self, model: Path, name: str, changes: dict[str, Any] | None = None, zero_stage: int = 0) -> None:
        given = {section: dict(values) for section, values in SETTINGS[name].items()}
        for section, values in (changes or {}).items():
            given[section] = {**given.get(section, {}), **values}
        given["learner"] |= {"groups_per_step": 4, "micro_batch_tokens": 1, "num_ranks": dist.get_world_size()}
        given["rollout"] = {"group_size": 2}
        self.settings = Settings.model_validate(given)
        roles = {}
        if name == "ppo":
            is_kept = bool(self.settings.reference.refresh_every_steps)
            of_policy = settings_of(model, book.LR)
            roles["critic"] = CriticEngine(settings_of(model, book.CRITIC_LR, zero_stage))
            roles["reference"] = ReferenceModel(of_policy, is_offloaded=True, is_kept=is_kept)
        self.roles = Roles(PolicyEngine(settings_of(model, book.LR, zero_stage)), **roles)
        self.objective = PolicyGradient(self.roles, self.settings, reduce_tensor)
        self.metrics: list[dict[str, float]] = []

    def step(self, number: int, groups: Sequence[Sequence[book.Answer]]) -> None:
        made = [self._group(f"g{place}", group, number - 1) for place, group in enumerate(groups)]
        share, _ = build_step(number, number - 1, made, self.settings.learner).share_of(dist.get_rank(), "r", 1, 1)
        trajectories = [group.trajectories[index] for group in made for index in sorted(group.trajectories)]
        own = {index: trajectories[index] for part in share.micro_batches for index in part}
        outcome = self.objective.take_step(share, own, number - 1)
        assert outcome.applied, outcome.detail
        self.metrics.append(outcome.metrics)

    def _group(self, name: str, answers: Sequence[book.Answer], version: int) -> Group:
        group = Group(name, Prompt(name, "?", "A", {}), "train", 0, 0, len(answers))
        for index, answer in enumerate(answers):
            ends = [place for place in range(len(answer.mask)) if answer.mask[place]]
            spans = [VersionSpan(place, place + 1, version) for place in ends]
            facts = example_facts(
                group=name,
                sample_index=index,
                reward=answer.reward,
                num_tokens=len(answer.tokens),
                num_prompt_tokens=2,
                version_spans=spans,
            )
            behaviour = np.zeros(len(answer.tokens), np.float32)
            behaviour[answer.mask] = self.roles.policy.logprobs(answer.batch()).numpy()
            group.receive(Trajectory(facts, answer.tokens, behaviour, answer.mask.astype(np.uint8)))
        return group

    def weights(self) -> dict[str, Tensor]:
        engines = {"policy": self.roles.policy, "critic": self.roles.critic}
        found = {}
        for role, engine in engines.items():
            for name, weight in engine.weights() if engine is not None else ():
                with engine.gather([weight]):
                    found[f"{role}/{name}"] = weight.detach().clone()
        return found


def make_groups(rng: np.random.Generator, num_groups: int, vocab_size: int) -> list[list[book.Answer]]:
    """Return groups of two answers of two turns each, with a reply between the turns that the model did not write."""
    return [[_answer(rng, vocab_size) for _ in range(2)] for _ in range(num_groups)]


def _answer(rng: np.random.Generator, vocab_size: int) -> book.Answer:
    prompt, first, reply, second = 2, int(rng.integers(1, 5)), 2, int(rng.integers(1, 4))
    mask = np.array([False] * prompt + [True] * first + [False] * reply + [True] * second)
    tokens = rng.integers(0, vocab_size, len(mask)).astype(np.int32)
    return book.Answer(tokens, mask, float(tokens[mask].mean() / vocab_size + rng.normal()))


def settings_of(model: Path, lr: float, zero_stage: Any = 0) -> PolicySettings:
    return PolicySettings(
        model_dir=model,
        dtype="float32",
        zero_stage=zero_stage,
        lr=lr,
        betas=(0.9, 0.95),
        weight_decay=0.0,
        max_grad_norm=1.0,
        warmup_steps=0,
        total_steps=1000,
        min_lr_ratio=1.0,
        schedule="constant",
        seed=0,
    )


def beside_the_textbook(model: Path, name: str) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    learner, slow = Learner(model, name), book.Textbook(settings_of(model, book.LR), name == "ppo")
    first_difference = None
    for number in range(1, NUM_STEPS[name] + 1):
        groups = make_groups(rng, 4, VOCAB)
        learner.step(number, groups)
        (slow.ppo_step if name == "ppo" else slow.grpo_step)(groups)
        if first_difference is None and not _is_same(learner.weights(), _weights_of(slow)):
            first_difference = number
        if number == NUM_FEW:
            few = learner.weights()
    return {
        "few": few,
        "first_difference": first_difference,
        "metrics": learner.metrics,
        "beta": slow.beta,
        "memory": dict(learner.roles.memory),
    }


def resumed(model: Path, name: str, folder: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """Return whether stopping after three of six steps and going on from what was saved changes a weight."""
    steps = [make_groups(np.random.default_rng(number), 4, VOCAB) for number in range(6)]
    whole, first = Learner(model, name, changes), Learner(model, name, changes)
    for number, groups in enumerate(steps, 1):
        whole.step(number, groups)
    for number, groups in enumerate(steps[:3], 1):
        first.step(number, groups)
    first.roles.save_state(folder / name)
    again = Learner(model, name, changes)
    again.roles.load_state(folder / name)
    for number, groups in enumerate(steps[3:], 4):
        again.step(number, groups)
    return {
        "is_same": _is_same(whole.weights(), again.weights()),
        "memory": (dict(whole.roles.memory), dict(again.roles.memory)),
        "files": sorted(str(path.relative_to(folder / name)) for path in (folder / name).rglob("*.json")),
    }


def warm_up(model: Path) -> dict[str, Any]:
    learner = Learner(model, "ppo", {"critic": {"warmup_steps": 2}})
    found = []
    for number in range(1, 4):
        before = learner.weights()
        learner.step(number, make_groups(np.random.default_rng(number), 4, VOCAB))
        after = learner.weights()
        moved = {name for name in after if not torch.equal(before[name], after[name])}
        found.append({role: any(name.startswith(role) for name in moved) for role in ("policy", "critic")})
    return {"moved": found, "metrics": learner.metrics}


def _weights_of(slow: book.Textbook) -> dict[str, Tensor]:
    models = {"policy": slow.policy, "critic": slow.critic}
    return {f"{role}/{n}": w.detach() for role, m in models.items() if m is not None for n, w in m.named_parameters()}


def _is_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def few_steps(model: Path, name: str, zero_stage: int) -> dict[str, Tensor]:
    rng, learner = np.random.default_rng(1), Learner(model, name, zero_stage=zero_stage)
    for number in range(1, NUM_FEW + 1):
        learner.step(number, make_groups(rng, 4, VOCAB))
    return learner.weights()


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    if len(sys.argv) > 2:
        rank, world_size, port, stage = map(int, sys.argv[2:])
        join_world(rank, world_size, "127.0.0.1", port, 60.0)
        few = {name: few_steps(folder / "model", name, stage) for name in NUM_STEPS}
        if rank == 0:
            torch.save(few, folder / "few.pt")
        dist.destroy_process_group()
        return
    join_world(0, 1, *free_address("127.0.0.1"), 60.0)
    model = folder / "model"
    several = {"learner": {"num_mini_batches": 2, "num_epochs": 2}, "policy": {"old_logprobs": "recompute"}}
    found = {
        "textbook": {name: beside_the_textbook(model, name) for name in NUM_STEPS},
        "resumed": {
            "grpo": resumed(model, "grpo", folder, {**several, "rewards": {"normalize": True}}),
            "ppo": resumed(model, "ppo", folder, {"reference": {"refresh_every_steps": 2}}),
        },
        "warm_up": warm_up(model),
    }
    torch.save(found, folder / "found.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
