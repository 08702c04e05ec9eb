"""One gradient, whatever ranks, ZeRO stage, offload, gradient checkpointing, adapters and role: the whole table.

    python -m tests.benchmarks.gradient_table [--seed N] [--short]

A tiny Qwen2 takes one step on seven trajectories in every case, on 1, 2 and 4 ranks over gloo, in float32. Printed: how
far the gradient is from that of one rank in ZeRO 0 without anything else, relative to its norm; the same of adapters
alone and of a critic. --short: 1 and 2 ranks. The trajectories are the same for every seed. Each case is told when it
is done; a world that does not end within half an hour is ended, and the command with it.

holds: at most a millionth everywhere.
"""

import sys
import tempfile
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from learner.models.training.deepspeed_config import import_deepspeed
from learner.models.weights.lora import LoraForm
from tests.chaos.rig.verdict import conclude, options
from tests.fakes.tiny_models import make_tiny_model
from tests.learner.models.forked_world import run_world
from tests.learner.models.gradient_ranks import Cases, gradients

_LIMIT = 1e-6
_WORLD_LIMIT_S = 1800
# What may be offloaded in a ZeRO stage.
_OFFLOADS = {0: ("none",), 1: ("none", "optimizer"), 2: ("none", "optimizer"), 3: ("none", "optimizer", "all")}
_KINDS: dict[str, dict[str, Any]] = {
    "policy": {},
    "adapters": {"lora": LoraForm(rank=4, alpha=8.0, targets=())},
    "critic": {},
}


def main() -> int:
    arguments = options(__doc__ or "")
    worlds = (1, 2) if arguments.short else (1, 2, 4)
    cases = all_cases()
    import_deepspeed()
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401  # once, not once a rank

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_tiny_model(folder / "model", tied=True, hidden_size=64)
        for world_size in worlds:
            run_world(world_size, folder, str(world_size), partial(gradients, cases=cases, tell=_tell), _WORLD_LIMIT_S)
        found = {world_size: torch.load(folder / f"{world_size}.pt") for world_size in worlds}
    largest = 0.0
    print("| case | " + " | ".join(f"{world_size} ranks" for world_size in worlds) + " |")
    print("|---|" + "---|" * len(worlds))
    for case in cases:
        expected = found[1][f"{case.split(',')[0]}, zero 0"]
        apart = [float((found[size][case] - expected).norm() / expected.norm()) for size in worlds]
        largest = max(largest, *apart)
        print(f"| {case} | " + " | ".join(f"{distance:.0e}" for distance in apart) + " |")
    num_cases = len(cases) * len(worlds)
    return conclude("gradient_table", largest <= _LIMIT, cases=num_cases, largest=f"{largest:.1e}")


def _tell(case: str, seconds: float) -> None:
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, {case}: {seconds:.1f} s", file=sys.stderr, flush=True)


def all_cases() -> Cases:
    """Return the settings of each case by its name, which begins with its kind."""
    cases: Cases = {}
    for (kind, form), stage, is_checkpointed in product(_KINDS.items(), _OFFLOADS, (False, True)):
        for offload in _OFFLOADS[stage]:
            name = f"{kind}, zero {stage}"
            name += "" if offload == "none" else f", offload {offload}"
            name += ", checkpointing" if is_checkpointed else ""
            cases[name] = {
                "zero_stage": stage,
                "offload": offload,
                "gradient_checkpointing": is_checkpointed,
                **form,
            }
    return cases


if __name__ == "__main__":
    raise SystemExit(main())
