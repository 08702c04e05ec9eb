"""What `--plan` says of a rank's memory beside the peak of torch's allocations in a real rank of that shape, on CPUs.

    python -m tests.learner.plan.measured_ranks [--only NAME;NAME] [--layers N]

Each case loads a run's models, takes two steps of two micro-batches and packs a push; rank 0 is measured. Layers are
few, as nothing but their number changes; host and device are one memory. holds: each plan is within 5 % of the peak.
"""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from learner.models.micro_batch import LearnerSample, make_micro_batch
from learner.plan.memory import rank_memory, read_sizes
from learner.rank.start import load_roles
from learner.weights.feed import BucketMemory, pack
from protocol.settings.settings import Settings
from tests.chaos.rig.verdict import conclude, options
from tests.gpu.models import SHAPES, write_folder
from tests.learner.models.forked_world import run_world
from tests.learner.plan.held_tensors import held_tensors

NUM_TOKENS, BUCKET_BYTES = 512, 16 << 20
_LORA, _PPO = {"dtype": "bfloat16", "lora": {"rank": 8}}, {"recipe": "ppo", "num_ranks": 2}
# Settings of each case, in bfloat16 unless they say otherwise.
CASES: dict[str, dict[str, Any]] = {
    "0.5B ZeRO 0, float32": {"policy": {"dtype": "float32"}},
    "0.5B ZeRO 2": {"learner": {"zero_stage": 2, "num_ranks": 2}},
    "0.5B ZeRO 3": {"learner": {"zero_stage": 3, "num_ranks": 2}},
    "0.5B ZeRO 3, hpZ": {
        "learner": {"zero_stage": 3, "num_ranks": 2, "deepspeed": {"zero_optimization": {"zero_hpz_partition_size": 2}}}
    },
    "0.5B ZeRO 2, offload": {"learner": {"zero_stage": 2, "offload": "optimizer", "num_ranks": 2}},
    "0.5B ZeRO 3, offload all": {"learner": {"zero_stage": 3, "offload": "all", "num_ranks": 2}},
    "0.5B LoRA": {"policy": _LORA},
    "0.5B LoRA, ZeRO 3": {"policy": _LORA, "learner": {"zero_stage": 3, "num_ranks": 2}},
    "0.5B critic, reference": {"learner": _PPO, "kl": {"coefficient": 0.1}},
    "0.5B critic, reference, ZeRO 3": {"learner": {**_PPO, "zero_stage": 3}, "kl": {"coefficient": 0.1}},
    "0.5B checkpointing": {"learner": {"gradient_checkpointing": True}},
    "1.5B ZeRO 2": {"learner": {"zero_stage": 2, "num_ranks": 2}},
    "1.5B ZeRO 3": {"learner": {"zero_stage": 3, "num_ranks": 2}},
}


@dataclass
class Tracked:
    """Bytes of torch's allocations in this thread, from their number at a block's beginning."""

    live: int = 0  # at its end
    peak: int = 0
    held: int = 0  # all tensors at its end: gloo frees memory in other threads

    @property
    def whole_peak(self) -> int:
        return self.peak - self.live + self.held


@contextmanager
def tracked() -> Iterator[Tracked]:
    found = Tracked()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        yield found
    assert profiled.profiler is not None
    events = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    for event in sorted((each for each in events if each.name() == "[memory]"), key=lambda each: each.start_ns()):
        found.live += event.nbytes()
        found.peak = max(found.peak, found.live)
    found.held = sum(held_tensors().values())


def settings_of(name: str, folder: Path) -> Settings:
    sections = CASES[name]
    policy = {"dtype": "bfloat16", **sections.get("policy", {}), "model": str(folder)}
    learner = {"micro_batch_tokens": NUM_TOKENS, **sections.get("learner", {})}
    rollout = {"max_context_tokens": NUM_TOKENS, "max_response_tokens": 16}
    return Settings.model_validate({**sections, "rollout": rollout, "policy": policy, "learner": learner})


def measure(settings: Settings, folder: Path) -> dict[str, int]:
    """Return this rank's peaks in bytes: of the start, of steps and of a push."""
    with tracked() as start:
        roles = load_roles(settings, {"policy.model": folder}, None, lambda phase: None)
    tokens = np.random.default_rng(0).integers(0, 262, NUM_TOKENS).astype(np.int32)
    batch = make_micro_batch([LearnerSample(tokens, np.arange(NUM_TOKENS) > 0, np.zeros(NUM_TOKENS, np.float32))])
    with tracked() as steps:
        for _ in range(2):
            if roles.reference is not None:
                with roles.reference.in_use():
                    roles.reference.logprobs(batch)
            if roles.critic is not None:
                roles.critic.step([batch, batch], lambda values, _: (values.square().sum(), {}), 1.0)
            roles.policy.step([batch, batch], lambda logprobs, *_: (-logprobs.sum(), {}), 1.0)
    weights, is_first = roles.policy.pushed_weights(BUCKET_BYTES), dist.get_rank() == 0
    with tracked() as push:
        gathered, memory, before = weights.buckets(is_sender=is_first), BucketMemory(weights.plan, "cpu"), None
        for flat in pack(weights.plan, gathered, memory) if is_first else ():
            if before is not None:
                memory.give_back(before)
            before = flat
        for _ in gathered:  # the other ranks gather
            pass
    return {"start": start.whole_peak, "steps": steps.whole_peak, "push": push.whole_peak}


def make_folder(folder: Path, name: str, num_layers: int, dtype: str) -> dict[str, Any]:
    shape = replace(SHAPES[name.split()[0]], layers=num_layers)
    return {"made": str(write_folder(folder, shape, getattr(torch, dtype)))}


def main() -> int:
    arguments = options(__doc__ or "", only="", layers=2)
    worst = 0.0
    for name in arguments.only.split(";") if arguments.only else CASES:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / "model"
            given = settings_of(name, folder)
            dtype = given.policy.dtype
            run_world(1, Path(place), "made", lambda _: make_folder(folder, name, arguments.layers, dtype))  # noqa: B023
            run_world(given.learner.num_ranks, Path(place), "found", lambda _: measure(given, folder), 600)  # noqa: B023
            found = torch.load(Path(place) / "found.pt")
            memory = rank_memory(given, read_sizes(given, folder), BUCKET_BYTES)
        planned, most = memory.device + memory.host, max(found.values())
        worst = max(worst, abs(planned / most - 1.0))
        figures = " | ".join(f"{value / 1e6:,.0f}" for value in (planned, *found.values()))
        print(f"| {name} | {figures} | {planned / most:.3f} |", flush=True)
    return conclude("measured_ranks", worst <= 0.05, worst=worst)


if __name__ == "__main__":
    sys.exit(main())
