"""A learner rank beside real vLLM engines: what it samples is trained, what is trained is pushed. Run by test_drift.

python pushing_rank.py FOLDER    writes what it saw to FOLDER/seen.pt, by learner: of all engines, one after the other
"""

import asyncio
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from learner.models.world import join_world
from learner.rank.push import RankPusher, natural_text
from protocol.settings.settings import Settings
from rollout.engine.engine import Engine
from rollout.engine.generation import Sampling
from tests.fakes.in_process_server import InProcessServer
from tests.fakes.ports import free_port
from tests.fakes.tiny_models import engine_of, make_tiny_mixture, make_tiny_model
from tests.textbook.answer import Answer
from tests.textbook.sluice_side import SluiceSide

NUM_STEPS, NUM_LEARNT = 4, 2
LR = 1e-2
VOCAB = 272
NUM_TOKENS = 16
GROUP_SIZE = 4
# What is the default on GPUs: bfloat16 on both sides, two workers an engine; and all that spares a GPU's memory.
AS_ON_GPUS: dict[str, dict[str, Any]] = {
    "policy": {"dtype": "bfloat16", "old_logprobs": "recompute"},
    "rollout": {"tensor_parallel_size": 2},
    "learner": {"recipe": "ppo", "zero_stage": 3, "offload": "all", "gradient_checkpointing": True},
    "critic": {"offload": True},
}
FULL_PRECISION: dict[str, dict[str, Any]] = {"policy": {"dtype": "float32"}, "learner": {"zero_stage": 0}}
LORA: dict[str, dict[str, Any]] = {"policy": {"dtype": "float32", "lora": {"rank": 4}}, "learner": {"zero_stage": 2}}
QUANTISED: dict[str, dict[str, Any]] = {"policy": {"dtype": "bfloat16"}, "learner": {"zero_stage": 2}}
ASYNC_SCHEDULER = "vllm.v1.core.sched.async_scheduler.AsyncScheduler"
EIGHT_BITS = {"quantization": "int8_per_channel_weight_only"}


@dataclass
class Seen:
    """What the steps and the pushes of one learner came to."""

    metrics: list[dict[str, float]] = field(default_factory=list)  # of each step
    digests: list[str] = field(default_factory=list)  # of each push
    greedy: list[float] = field(default_factory=list)  # largest difference to a greedy answer, nats, after each push
    num_batched: int = 0  # tokens that the engine computes at once


class Pushing:
    """A learner of one rank, and an engine in this process's event loop."""

    def __init__(self, engine: Engine, model: Path, lr: float, changes: dict[str, dict[str, Any]]) -> None:
        given = {name: dict(values) for name, values in changes.items()}
        given["policy"] = given.get("policy", {}) | {"model": str(model)}
        given["rollout"] = given.get("rollout", {}) | {"group_size": GROUP_SIZE}
        given["learner"] = given.get("learner", {}) | {"lr": lr, "groups_per_step": 2, "lr_schedule": "constant"}
        given["learner"] |= {"num_ranks": 1, "micro_batch_tokens": 64}
        settings = Settings.model_validate(given)
        self.engine = engine
        self.learner = SluiceSide(settings, model)
        server = InProcessServer("engine", engine)
        self.pusher = RankPusher(
            self.learner.roles.policy, settings, [server], "127.0.0.1", "gloo", natural_text(model)
        )
        self.version = 0
        self.seen = Seen(metrics=self.learner.metrics)

    async def run(self, num_steps: int) -> Seen:
        await self._push()
        for _ in range(num_steps):
            groups = [await self._group(place) for place in range(self.learner.settings.learner.groups_per_step)]
            await asyncio.to_thread(self.learner.step, self.version + 1, groups)
            self.version += 1
            await self._push()
        await asyncio.to_thread(self.pusher.close)
        return self.seen

    async def _push(self) -> None:
        report = await asyncio.to_thread(self.pusher.push, self.version)
        assert report is not None
        assert report.failed == {}
        self.seen.digests.append(report.digest)
        greedy = await self._answer([5, 6, 7], 0, is_greedy=True)
        logprobs = await asyncio.to_thread(self.learner.roles.policy.logprobs, greedy.batch())
        assert greedy.behaviour is not None
        self.seen.greedy.append(float((logprobs - torch.tensor(greedy.behaviour[greedy.mask])).abs().max()))

    async def _group(self, place: int) -> list[Answer]:
        prompt = [int(token) for token in np.random.default_rng((self.version, place)).integers(2, VOCAB, 6)]
        return await asyncio.gather(*[self._answer(prompt, index) for index in range(GROUP_SIZE)])

    async def _answer(self, prompt: list[int], index: int, is_greedy: bool = False) -> Answer:
        sampling = Sampling(NUM_TOKENS, 1.0, seed=index, greedy=is_greedy)
        name = f"{self.version}-{is_greedy}-{index}-{prompt}"
        generation = await self.engine.generate(prompt, sampling, name)
        assert [version for _, _, version in generation.version_spans] == [self.version]
        tokens = np.array([*prompt, *generation.tokens], np.int32)
        behaviour = np.array([*[0.0] * len(prompt), *generation.logprobs], np.float32)
        reward = float(np.mean(generation.tokens) / VOCAB)
        return Answer(tokens, np.arange(len(tokens)) >= len(prompt), reward, behaviour)


async def as_on_gpus(folder: Path) -> dict[str, Seen]:
    """bfloat16 on both sides, an engine with a process of its own, two workers and vLLM's asynchronous scheduler; PPO
    in ZeRO 3 with weights and optimizers offloaded, gradient checkpointing and recomputed old logprobs."""
    model = make_tiny_model(folder / "dense", tied=False, width=0.05)
    changes = {"tensor_parallel_size": 2, "engine_args": {"scheduler_cls": ASYNC_SCHEDULER}}
    engine = await Engine.start(engine_of(model, "bfloat16").model_copy(update=changes))
    seen = await Pushing(engine, model, 0.0, AS_ON_GPUS).run(NUM_STEPS)
    seen.num_batched = engine._llm.vllm_config.scheduler_config.max_num_batched_tokens
    engine.shutdown()
    return {"bfloat16": seen}


async def mixture(folder: Path) -> dict[str, Seen]:
    """A mixture of experts in float32: not trained, trained whole, and trained by LoRA adapters, pushed merged."""
    model = make_tiny_mixture(folder / "mixture")
    engine = await Engine.start(engine_of(model))
    seen = {
        "float32": await Pushing(engine, model, 0.0, FULL_PRECISION).run(NUM_STEPS),
        "mixture": await Pushing(engine, model, LR, FULL_PRECISION).run(NUM_LEARNT),
        "lora": await Pushing(engine, model, LR, LORA).run(NUM_LEARNT),
    }
    engine.shutdown()
    return seen


async def quantised(folder: Path) -> dict[str, Seen]:
    """An engine that makes eight bits of each linear layer's weights as they come, of what is trained in bfloat16."""
    model = make_tiny_model(folder / "quantised", tied=True, width=0.05)
    asked = engine_of(model, "bfloat16").model_copy(update={"engine_args": EIGHT_BITS})
    engine = await Engine.start(asked)
    seen = {"quantised": await Pushing(engine, model, LR, QUANTISED).run(NUM_LEARNT)}
    engine.shutdown()
    return seen


async def all_engines(folder: Path) -> dict[str, Seen]:
    return {**await as_on_gpus(folder), **await mixture(folder), **await quantised(folder)}


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    join_world(0, 1, "127.0.0.1", free_port(), 60.0)
    seen = asyncio.run(all_engines(folder))
    torch.save({name: asdict(each) for name, each in seen.items()}, folder / "seen.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
