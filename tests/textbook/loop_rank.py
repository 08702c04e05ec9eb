"""The learner's steps beside the textbook's, and resumed in the middle.

    python -m tests.textbook.loop_rank FOLDER [STEPS]    prints the first step that differs, by algorithm; 50 steps

One rank writes what it found to FOLDER/found.pt. Two ranks then take the first steps in ZeRO 3, and the last of what
the one rank saved: FOLDER/few.pt, of rank 0. Ranks are forked from this process, which has imported everything.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from learner.models.training.deepspeed_config import import_deepspeed
from protocol.settings.settings import Settings
from protocol.wire.trajectory import Trajectory
from tests.fakes.tiny_models import make_tiny_model
from tests.learner.coordinator.coordinator_script import Script
from tests.learner.models.forked_world import run_world
from tests.textbook.answer import Answer
from tests.textbook.loop import Textbook
from tests.textbook.rows import Rows
from tests.textbook.sluice_side import SluiceSide

NUM_STEPS = 12  # of each algorithm in the tests
NUM_FEW = 5
NUM_TOGETHER = 6  # steps of all at once; the state after half of them is saved
VOCAB = 272
SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {"learner": {"recipe": "grpo"}},
    "dapo": {"learner": {"recipe": "dapo", "max_staleness": 0}},
    "ppo": {
        "learner": {"recipe": "ppo", "num_mini_batches": 2, "num_epochs": 2, "correction": "none"},
        "critic": {"lr": 2e-3},
        "reference": {"offload": True},
        "kl": {"coefficient": 0.05, "target": 0.02, "horizon": 40.0},
        "rewards": {"clip": None},
    },
}
ROWS = {name: {"objective": name} for name in ("sft", "dpo", "kto", "distill")}
# All at once: filter, critic, two mini-batches times two epochs, adaptive KL in the reward, adapters.
SETTINGS["together"] = {
    **SETTINGS["ppo"],
    "learner": {**SETTINGS["ppo"]["learner"], "max_staleness": 0},
    "policy": {"lora": {"rank": 4, "alpha": 8.0}},
    "filter": {"dynamic_sampling": True},
}
# ZeRO stages in which two ranks repeat an objective on rows.
STAGES = {"sft": (3,), "dpo": (0, 1, 2, 3), "kto": (3,), "distill": (0, 3)}
_OF_ONE = ("sft", "distill")  # a group is one answer
COMMON: dict[str, dict[str, Any]] = {
    "run": {"max_steps": 50},
    "policy": {"dtype": "float32"},
    "rollout": {"group_size": 2},
    "learner": {"lr": 1e-3, "lr_schedule": "constant", "groups_per_step": 4, "micro_batch_tokens": 1},
}


def settings_of(model: Path, name: str, **changes: dict[str, Any]) -> Settings:
    given: dict[str, Any] = {"policy": {"model": str(model)}, **ROWS.get(name, {})}
    for layer in (COMMON, SETTINGS.get(name, {"rollout": {"group_size": 1 if name in _OF_ONE else 2}}), changes):
        for section, values in layer.items():
            given[section] = given.get(section, {}) | values
    if name == "distill":
        given["reference"] = {"model": str(model.with_name("teacher"))}
    given["learner"]["num_ranks"] = dist.get_world_size()
    return Settings.model_validate(given)


def make_groups(rng: np.random.Generator, num_groups: int, is_binary: bool = False) -> list[list[Answer]]:
    """Return groups of two answers of two turns each, with a reply between the turns that the model did not write."""
    return [[_answer(rng, is_binary) for _ in range(2)] for _ in range(num_groups)]


def make_rows(rng: np.random.Generator, name: str) -> list[list[Answer]]:
    """Return four groups of an objective on rows."""
    made = []
    for first, second in make_groups(rng, 4):
        is_better = name != "kto" or first.reward > 0.5
        rewards = (1.0 if is_better else -1.0, 0.0 if name == "kto" else -1.0)
        pair = [replace(each, reward=reward) for each, reward in zip((first, second), rewards, strict=True)]
        made.append(pair[:1] if name in _OF_ONE else pair)
    return made


def _answer(rng: np.random.Generator, is_binary: bool) -> Answer:
    prompt, first, reply, second = 2, int(rng.integers(1, 5)), 2, int(rng.integers(1, 4))
    mask = np.array([False] * prompt + [True] * first + [False] * reply + [True] * second)
    tokens = rng.integers(0, VOCAB, len(mask)).astype(np.int32)
    reward = float(tokens[mask].mean() / VOCAB + rng.normal())
    return Answer(tokens, mask, float(reward > 0.5) if is_binary else reward)


def beside_the_textbook(model: Path, name: str, num_steps: int) -> dict[str, Any]:
    rng, settings = np.random.default_rng(1), settings_of(model, name)
    learner = SluiceSide(settings, model)
    slow: Textbook | Rows = Rows(settings, model) if name in ROWS else Textbook(settings, model)
    before, first_difference = learner.weights(), None
    for number in range(1, num_steps + 1):
        groups = make_rows(rng, name) if name in ROWS else make_groups(rng, 4)
        learner.step(number, groups)
        slow.step(groups)
        if first_difference is None and not _is_same(learner.weights(), weights_of(slow)):
            first_difference = number
        if number == NUM_FEW:
            few = learner.weights()
    return {
        "before": before,
        "few": few,
        "first_difference": first_difference,
        "metrics": learner.metrics,
        "beta": getattr(slow, "beta", None),
        "memory": dict(learner.roles.memory),
    }


def in_parts(groups: list[list[Answer]]) -> list[list[list[Answer]]]:
    """Return a step's four groups in parts of one, two and one."""
    return [groups[2:3], groups[:2], groups[3:]]


def parts_beside_the_textbook(model: Path, folder: Path, num_steps: int) -> dict[str, Any]:
    """A real coordinator hands out the step's groups as they come back: the third, then two, then the last."""
    folder.mkdir()
    settings = settings_of(model, "grpo", learner={"max_staleness": 0})
    learner, slow, script = SluiceSide(settings, model), Textbook(settings, model), Script(folder, settings, 64)
    rng, first_difference = np.random.default_rng(1), None
    for number in range(1, num_steps + 1):
        groups = make_groups(rng, 4)
        leases = script.demand(version=number - 1)
        slow.step_in_parts(in_parts(groups))
        for part, chosen in enumerate(((2,), (0, 1), (3,))):
            delivered: dict[tuple[str, int], Trajectory] = {}
            for place in chosen:
                lease = leases[place]
                facts = {"group": lease.group, "attempt": lease.attempt, "incarnation": lease.incarnation}
                for index, answer in enumerate(groups[place]):
                    trajectory = learner.trajectory(answer, number - 1, sample_index=index, **facts)
                    assert script.send_trajectory("s1", trajectory).outcome == "accepted"
                    delivered[lease.group, index] = trajectory
            share = script.batch(number, part=part)
            assert share.is_last == (part == 2)
            learner.take(share, [delivered[facts.group, facts.sample_index] for facts in share.facts])
        script.step(number, version=number)
        if first_difference is None and not _is_same(learner.weights(), weights_of(slow)):
            first_difference = number
    return {"first_difference": first_difference, "metrics": learner.metrics, "lines": script.metrics()}


def filtered_beside_the_textbook(model: Path, name: str, folder: Path, num_steps: int) -> dict[str, Any]:
    """A real coordinator leases prompts, filters what comes back and hands out the steps."""
    folder.mkdir()
    settings = settings_of(model, name)
    learner, slow, script = SluiceSide(settings, model), Textbook(settings, model), Script(folder, settings, 64)
    groups = make_groups(np.random.default_rng(2), 16 * num_steps, is_binary=True)
    sampled, told, first_difference, before = iter(groups), iter(groups), None, learner.weights()
    for number in range(1, num_steps + 1):
        delivered: dict[tuple[str, int], Trajectory] = {}
        while leases := script.demand(version=number - 1):
            for lease in leases:
                facts = {"group": lease.group, "attempt": lease.attempt, "incarnation": lease.incarnation}
                for index, answer in enumerate(next(sampled)):
                    trajectory = learner.trajectory(answer, number - 1, sample_index=index, **facts)
                    assert script.send_trajectory("s1", trajectory).outcome == "accepted"
                    delivered[lease.group, index] = trajectory
        share = script.batch(number)
        learner.take(share, [delivered[facts.group, facts.sample_index] for facts in share.facts])
        script.step(number, version=number)
        slow.step(slow.groups_of_use(told))
        if first_difference is None and not _is_same(learner.weights(), weights_of(slow)):
            first_difference = number
        if number == num_steps // 2:
            learner.roles.save_state(folder / "half")
    return {
        "before": before,
        "after": weights_of(slow),
        "first_difference": first_difference,
        "metrics": learner.metrics,
        "beta": slow.beta,
        "memory": dict(learner.roles.memory),
        "is_level": len(list(sampled)) == len(list(told)),
        "lines": script.metrics(),
    }


def second_half(model: Path, name: str, folder: Path, num_steps: int, zero_stage: int) -> dict[str, Any]:
    """Return what comes of the state that was saved after half of the steps, on this world's ranks."""
    settings = settings_of(model, name, learner={"zero_stage": zero_stage}, critic={"zero_stage": 2})
    learner, half = SluiceSide(settings, model), num_steps // 2
    learner.roles.load_state(folder / "half")
    groups = make_groups(np.random.default_rng(2), 16 * num_steps, is_binary=True)
    mixed = [group for group in groups if len({answer.reward for answer in group}) == 2]
    for number in range(half + 1, num_steps + 1):
        learner.step(number, mixed[(number - 1) * 4 : number * 4])
    return {"after": learner.weights(), "memory": dict(learner.roles.memory)}


def resumed(model: Path, name: str, folder: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """Return whether stopping after three of six steps and going on from what was saved changes a weight."""
    steps = [make_groups(np.random.default_rng(number), 4) for number in range(6)]
    settings = settings_of(model, name, **changes)
    whole, first = SluiceSide(settings, model), SluiceSide(settings, model)
    for number, groups in enumerate(steps, 1):
        whole.step(number, groups)
    for number, groups in enumerate(steps[:3], 1):
        first.step(number, groups)
    first.roles.save_state(folder / name)
    again = SluiceSide(settings, model)
    again.roles.load_state(folder / name)
    for number, groups in enumerate(steps[3:], 4):
        again.step(number, groups)
    return {
        "is_same": _is_same(whole.weights(), again.weights()),
        "memory": (dict(whole.roles.memory), dict(again.roles.memory)),
        "files": sorted(str(path.relative_to(folder / name)) for path in (folder / name).rglob("*.json")),
    }


def warm_up(model: Path) -> dict[str, Any]:
    learner = SluiceSide(settings_of(model, "ppo", critic={"warmup_steps": 2}), model)
    found = []
    for number in range(1, 4):
        before = learner.weights()
        learner.step(number, make_groups(np.random.default_rng(number), 4))
        after = learner.weights()
        moved = {name for name in after if not torch.equal(before[name], after[name])}
        found.append({role: any(name.startswith(role) for name in moved) for role in ("policy", "critic")})
    return {"moved": found, "metrics": learner.metrics}


def weights_of(loop: Textbook | Rows) -> dict[str, Tensor]:
    """Return every trained weight of a plain loop, "ROLE/NAME" -> a copy of it in the CPU's memory."""
    models = {"policy": loop.policy, "critic": loop.critic}
    named = ((f"{role}/{n}", w) for role, m in models.items() if m is not None for n, w in m.named_parameters())
    return {name: weight.detach().to("cpu", copy=True) for name, weight in named if weight.requires_grad}


def _is_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def few_steps(model: Path, name: str, zero_stage: int, micro_batch_tokens: int = 1) -> dict[str, Tensor]:
    rng, changes = np.random.default_rng(1), {"zero_stage": zero_stage, "micro_batch_tokens": micro_batch_tokens}
    learner = SluiceSide(settings_of(model, name, learner=changes), model)
    for number in range(1, NUM_FEW + 1):
        learner.step(number, make_rows(rng, name) if name in ROWS else make_groups(rng, 4))
    return learner.weights()


def few_in_parts(model: Path, zero_stage: int) -> dict[str, Tensor]:
    rng, learner = (
        np.random.default_rng(1),
        SluiceSide(settings_of(model, "grpo", learner={"zero_stage": zero_stage}), model),
    )
    for number in range(1, NUM_FEW + 1):
        learner.step_in_parts(number, in_parts(make_groups(rng, 4)))
    return learner.weights()


def on_one_rank(folder: Path, num_steps: int) -> dict[str, Any]:
    model = make_tiny_model(folder / "model", tied=True, hidden_size=32, num_layers=1)
    make_tiny_model(folder / "teacher", tied=False, hidden_size=64, num_layers=1, vocab_size=VOCAB + 8, seed=1)
    several = {"learner": {"num_mini_batches": 2, "num_epochs": 2}, "policy": {"old_logprobs": "recompute"}}
    return {
        "textbook": {
            **{name: beside_the_textbook(model, name, num_steps) for name in ("grpo", "ppo", "sft", "dpo")},
            "dapo": filtered_beside_the_textbook(model, "dapo", folder / "dapo", num_steps),
            "together": filtered_beside_the_textbook(model, "together", folder / "together", NUM_TOGETHER),
            "in parts": parts_beside_the_textbook(model, folder / "parts", num_steps),
        },
        "packed": {name: few_steps(model, name, 0, micro_batch_tokens=4096) for name in ("grpo", "ppo")},
        "resumed": {
            "grpo": resumed(model, "grpo", folder, {**several, "rewards": {"normalize": True, "clip": 100.0}}),
            "ppo": resumed(model, "ppo", folder, {"reference": {"refresh_every_steps": 2}}),
        },
        "warm_up": warm_up(model),
        "rows": {name: few_steps(model, name, 0) for name in STAGES},
        "in parts": few_in_parts(model, 0),
    }


def on_two_ranks(folder: Path) -> dict[str, Any]:
    model = folder / "model"
    few = {name: few_steps(model, name, zero_stage=3) for name in ("grpo", "ppo")}
    rows = {f"{name}, ZeRO {stage}": few_steps(model, name, stage) for name in STAGES for stage in STAGES[name]}
    return {
        **few,
        "rows": rows,
        "in parts": {stage: few_in_parts(model, stage) for stage in (0, 1, 2, 3)},
        "together": second_half(folder / "model", "together", folder / "together", NUM_TOGETHER, 3),
    }


def main(arguments: Sequence[str]) -> None:
    folder, num_steps = Path(arguments[0]), int(arguments[1]) if len(arguments) > 1 else 50
    import_deepspeed()
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401  # once, not once a rank

    run_world(1, folder, "found", partial(on_one_rank, num_steps=num_steps))
    run_world(2, folder, "few", on_two_ranks)
    for name, found in torch.load(folder / "found.pt")["textbook"].items():
        print(f"{name} steps={len(found['metrics'])} first_difference={found['first_difference']}")


if __name__ == "__main__":
    main(sys.argv[1:])
