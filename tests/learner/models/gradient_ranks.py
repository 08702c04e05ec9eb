"""One gradient in many ways, run by test_gradient_ranks: `python gradient_ranks.py FOLDER`.

For worlds of 1, 2 and 4 ranks and each of their cases it has a step refused, takes one on the same seven trajectories,
saves its state and takes a step more; a world of one rank in ZeRO 0 then reads every state and takes that step too.
Ranks are forked from this process, which has imported everything. Rank 0 of each world writes what it found to
FOLDER/WORLD.pt.
"""

import gc
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from learner.data.packing import plan_step
from learner.models.critic import CriticEngine
from learner.models.gradient import StepResult, Sums
from learner.models.micro_batch import MicroBatch, make_micro_batch
from learner.models.policy import PolicyEngine
from learner.models.training.deepspeed_config import import_deepspeed
from learner.models.weights.lora import LoraForm
from tests.learner.models.forked_world import run_world
from tests.learner.models.small_policy import flat, loss, settings, trajectories
from tests.learner.plan.held_tensors import held_tensors

# Settings that must not change a gradient.
CASES: dict[str, dict[str, Any]] = {
    "zero 0": {},
    "zero 1": {"zero_stage": 1},
    "zero 2": {"zero_stage": 2},
    "zero 3": {"zero_stage": 3},
    "zero 0, checkpointing": {"gradient_checkpointing": True},
    "zero 1, offload": {"zero_stage": 1, "offload": "optimizer"},
    "zero 2, offload": {"zero_stage": 2, "offload": "optimizer"},
    "zero 3, offload": {"zero_stage": 3, "offload": "optimizer"},
    "zero 3, offload of all, checkpointing": {"zero_stage": 3, "offload": "all", "gradient_checkpointing": True},
}
# In bfloat16 rounding depends on how micro-batches are laid out: each is compared with float32. ZeRO 0 and 1 run as 2.
LOW_CASES = {
    f"{name}, bfloat16": {**CASES[name], "dtype": "bfloat16"}
    for name in (
        "zero 0, checkpointing",
        "zero 1",
        "zero 1, offload",
        "zero 3",
        "zero 3, offload of all, checkpointing",
    )
}
_LORA = LoraForm(rank=4, alpha=8.0, targets=())
# Adapters alone are trained: compared among themselves.
LORA_CASES: dict[str, dict[str, Any]] = {
    "lora, zero 0": {"lora": _LORA},
    "lora, zero 2": {"lora": _LORA, "zero_stage": 2},
    "lora, zero 3, checkpointing": {"lora": _LORA, "zero_stage": 3, "gradient_checkpointing": True},
}
EXPORTED = "lora, zero 3, checkpointing"
# A critic's, compared among themselves.
CRITIC_CASES: dict[str, dict[str, Any]] = {
    "critic, zero 0": {},
    "critic, zero 1, checkpointing": {"zero_stage": 1, "gradient_checkpointing": True},
    "critic, zero 2, offload": {"zero_stage": 2, "offload": "optimizer"},
    "critic, zero 3": {"zero_stage": 3},
}
# Of a mixture whose router stays in float32 and has a bias that is not trained: as many parameters on each rank.
MIXTURE_CASES: dict[int, dict[str, dict[str, Any]]] = {
    1: {"zero 0": {}},
    2: {"zero 2": {"zero_stage": 2}, "zero 3, bfloat16": {"zero_stage": 3, "dtype": "bfloat16"}},
}
ALL = CASES | LOW_CASES | LORA_CASES | CRITIC_CASES
WORLDS = (1, 2, 4)
# Two cores run four ranks slowly.
_ON_RANKS = {
    1: ("zero 0", "zero 3, offload of all, checkpointing", "lora, zero 0", "critic, zero 0"),
    4: ("zero 3, offload of all, checkpointing", EXPORTED, "critic, zero 3"),
}
Cases = dict[str, dict[str, Any]]


def cases_of(world_size: int) -> Cases:
    """Return the cases that a world of so many ranks runs."""
    return {name: ALL[name] for name in _ON_RANKS.get(world_size, ALL)}


def make(folder: Path, name: str, case: dict[str, Any]) -> PolicyEngine | CriticEngine:
    of_case = replace(settings(folder / "model", 0), **case)
    return CriticEngine(of_case) if name.startswith("critic") else PolicyEngine(of_case)


def step(model: PolicyEngine | CriticEngine, *, is_broken: bool = False) -> None:
    """Take a step. is_broken: with a number that is not finite, so that it is refused."""
    samples = trajectories()
    if is_broken:
        broken = np.full(len(samples[0].tokens), np.nan, np.float32)
        samples[0] = replace(samples[0], behaviour_logprobs=broken)
    plan = plan_step([len(s.tokens) for s in samples], dist.get_world_size(), 50)[dist.get_rank()]
    parts = [make_micro_batch([samples[i] for i in part]) for part in plan]
    weight = sum(int(s.loss_mask.sum()) for s in samples)
    if isinstance(model, CriticEngine):
        result = model.step(parts, value_loss, weight)
    else:
        result = model.step(parts, loss, weight)
    assert result.applied != is_broken


def value_loss(values: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Sums]:
    return (values - micro_batch.behaviour_logprobs - micro_batch.advantages).square().sum(), {"value": values.sum()}


def state_of(policy: PolicyEngine | CriticEngine) -> dict[str, Tensor]:
    """Return master weights and first moments; after one step these are the clipped gradient times 0.1."""
    shards = policy._shards
    found = {}
    for key in ("weight", "exp_avg"):
        found[key] = flat({name: shards.whole(p, key).detach().cpu().clone() for name, p in policy.weights()})
    return found


def train(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, case in cases_of(dist.get_world_size()).items():
        before = held_bytes()
        policy = make(folder, name, case)
        step(policy, is_broken=True)
        step(policy)
        found[name] = state_of(policy)
        policy.save_state(folder / f"{dist.get_world_size()} {name}")
        with policy.gather([p for _, p in policy.weights()]):
            found[name]["model"] = flat({name: p.detach().cpu().clone() for name, p in policy.weights()})
            found[name]["dtype"] = next(iter(policy.weights()))[1].dtype
        if isinstance(policy, PolicyEngine):
            is_sender = dist.get_rank() == 0
            pushed = policy.pushed_weights(bucket_bytes=50_000).tensors(is_sender=is_sender)
            found[name]["pushed"] = torch.cat([torch.empty(0), *(tensor.float().flatten() for _, tensor in pushed)])
            if name == EXPORTED:
                policy.export_hf(folder / f"{dist.get_world_size()} export")
        kept = sum(tensor.nbytes for tensor in found[name].values() if isinstance(tensor, Tensor))
        found[name]["held"] = held_in_step(policy) - before - kept
        found[name]["further"] = state_of(policy)["weight"]
        del policy  # all of it, before the next one's memory is counted
    for name, case in MIXTURE_CASES.get(dist.get_world_size(), {}).items():
        mixture = PolicyEngine(replace(settings(folder / "mixture", 0), **case))
        step(mixture, is_broken=True)
        step(mixture)
        found[f"mixture, {name}"] = state_of(mixture) | {"bias": bias_of_last_rank(mixture)}
    return found


def bias_of_last_rank(mixture: PolicyEngine) -> Tensor:
    (bias,) = (each.clone() for name, each in mixture._model.named_buffers() if name.endswith("correction_bias"))
    dist.broadcast(bias, dist.get_world_size() - 1)
    return bias


def held_in_step(model: PolicyEngine | CriticEngine) -> int:
    """Take a step; return the bytes of all tensors of this process when its gradient is there."""
    update, held = model.update, []

    def counted(sums: Sums, weight: float) -> StepResult:
        held.append(held_bytes())
        return update(sums, weight)

    vars(model)["update"] = counted
    step(model)
    return held[0]


def held_bytes() -> int:
    return sum(held_tensors().values())


def read(folder: Path) -> dict[str, Any]:
    """Return, by writer's ranks and case, the weights after one step more on one rank in ZeRO 0."""
    found = {}
    for cases in (CASES, LORA_CASES, CRITIC_CASES):
        first = next(iter(cases))
        model = make(folder, first, cases[first])
        for world_size in WORLDS:
            for name in cases.keys() & cases_of(world_size):
                model.load_state(folder / f"{world_size} {name}")
                step(model)
                found[f"{world_size} {name}"] = state_of(model)["weight"]
    return found


def main(arguments: Sequence[str]) -> None:
    folder = Path(arguments[0])
    import_deepspeed()
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401  # once, not once a rank

    gc.freeze()  # what is there by now is not a tensor of a model: counting leaves it out

    for world_size in WORLDS:
        run_world(world_size, folder, str(world_size), train)
    run_world(1, folder, "read", read)


if __name__ == "__main__":
    main(sys.argv[1:])
