"""One gradient in many ways, run by test_gradient_ranks: `python gradient_ranks.py FOLDER`.

For worlds of 1, 2 and 4 ranks and each of CASES it takes one step on the same seven trajectories and saves its state;
a world of one rank in ZeRO 0 then reads every state and takes a step more. Ranks are forked from this process, which
has imported everything. Rank 0 of each world writes what it found to FOLDER/WORLD.pt.
"""

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from learner.models.policy import PolicyEngine
from learner.models.training.deepspeed_config import import_deepspeed
from learner.models.weights.lora import LoraForm
from learner.models.world import free_address, join_world
from learner.packing.micro_batch import make_micro_batch
from learner.packing.plan import plan_step
from tests.learner.models.policy_ranks import flat, loss, settings, trajectories

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
# In bfloat16 rounding depends on how micro-batches are laid out: each is compared with float32. (ZeRO 0 runs as 2.)
LOW_CASES = {
    f"{name}, bfloat16": {**CASES[name], "dtype": "bfloat16"}
    for name in ("zero 0, checkpointing", "zero 1, offload", "zero 3", "zero 3, offload of all, checkpointing")
}
_LORA = LoraForm(rank=4, alpha=8.0, targets=())
# Adapters alone are trained: compared among themselves.
LORA_CASES: dict[str, dict[str, Any]] = {
    "lora, zero 0": {"lora": _LORA},
    "lora, zero 2": {"lora": _LORA, "zero_stage": 2},
    "lora, zero 3, checkpointing": {"lora": _LORA, "zero_stage": 3, "gradient_checkpointing": True},
}
WORLDS = (1, 2, 4)


def step(policy: PolicyEngine) -> None:
    samples = trajectories()
    plan = plan_step([len(s.tokens) for s in samples], dist.get_world_size(), 50)[dist.get_rank()]
    parts = [make_micro_batch([samples[i] for i in part]) for part in plan]
    result = policy.step(parts, loss, sum(int(s.loss_mask.sum()) for s in samples))
    assert result.applied


def state_of(policy: PolicyEngine) -> dict[str, Tensor]:
    """Return master weights and first moments; after one step these are the clipped gradient times 0.1."""
    shards = policy._shards
    found = {}
    for key in ("weight", "exp_avg"):
        found[key] = flat({name: shards.whole(p, key).detach().cpu().clone() for name, p in policy.weights()})
    return found


def train(folder: Path) -> dict[str, Any]:
    found = {}
    for name, case in (CASES | LOW_CASES | LORA_CASES).items():
        policy = PolicyEngine(replace(settings(folder / "model", 0), **case))
        step(policy)
        found[name] = state_of(policy)
        policy.save_state(folder / f"{dist.get_world_size()} {name}")
        with policy.gather([p for _, p in policy.weights()]):
            found[name]["model"] = flat({name: p.detach().cpu().clone() for name, p in policy.weights()})
            found[name]["dtype"] = next(iter(policy.weights()))[1].dtype
        pushed = policy.pushed_weights(bucket_bytes=50_000).buckets(is_sender=True)
        found[name]["pushed"] = flat({name: tensor.float().clone() for bucket in pushed for name, tensor in bucket})
    return found


def read(folder: Path) -> dict[str, Any]:
    """Return, by writer's ranks and case, the weights after one step more on one rank in ZeRO 0."""
    policy = PolicyEngine(settings(folder / "model", 0))
    found = {}
    for world_size in WORLDS:
        for name in CASES:
            policy.load_state(folder / f"{world_size} {name}")
            step(policy)
            found[f"{world_size} {name}"] = state_of(policy)["weight"]
    policy = PolicyEngine(replace(settings(folder / "model", 0), lora=_LORA))
    for world_size in WORLDS:
        for name in LORA_CASES:
            policy.load_state(folder / f"{world_size} {name}")
            step(policy)
            found[f"{world_size} {name}"] = state_of(policy)["weight"]
    return found


def run_world(world_size: int, folder: Path, name: str, work: Callable[[Path], dict[str, Any]]) -> None:
    host, port = free_address("127.0.0.1")
    children = []
    for rank in range(world_size):
        child = os.fork()
        if child == 0:
            os._exit(_run_rank(rank, world_size, (host, port), folder / f"{name}.pt", lambda: work(folder)))
        children.append(child)
    codes = [os.waitpid(child, 0)[1] for child in children]
    if any(codes):
        raise SystemExit(f"ranks of {name} ended with {codes}")


def _run_rank(
    rank: int, world_size: int, address: tuple[str, int], path: Path, work: Callable[[], dict[str, Any]]
) -> int:
    try:
        torch.set_num_threads(1)
        join_world(rank, world_size, *address, 120.0)
        found = work()
        if rank == 0:
            torch.save(found, path)
        dist.barrier()
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main(arguments: Sequence[str]) -> None:
    folder = Path(arguments[0])
    import_deepspeed()
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401  # once, not once a rank

    for world_size in WORLDS:
        run_world(world_size, folder, str(world_size), train)
    run_world(1, folder, "read", read)


if __name__ == "__main__":
    main(sys.argv[1:])
