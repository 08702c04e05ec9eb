"""A learner's model beside a vLLM engine that it is pushed to, and how far apart their logprobs are."""

import asyncio
from dataclasses import dataclass

import torch
from transformers import Qwen2ForCausalLM

from learner.weights.push import PushReport, WeightPusher
from rollout.engine.engine import Engine
from rollout.engine.generation import Generation, Sampling
from tests.fakes.in_process_server import InProcessServer
from tests.fakes.planned_weights import planned

PROMPT = [20, 21, 14, 22, 23, 32] * 3


@dataclass
class Pair:
    """A learner's model, the engine that serves it, and the push between them."""

    learner: Qwen2ForCausalLM
    engine: Engine
    server: InProcessServer
    pusher: WeightPusher
    version: int = 0

    def step(self) -> None:
        """Move every weight, as an optimizer step would, but far enough that old weights cannot be mistaken for new."""
        with torch.no_grad():
            for parameter in self.learner.parameters():
                parameter.add_(0.03 * torch.randn_like(parameter))

    async def push(self) -> PushReport:
        self.version += 1
        return await self.push_as(self.version, self.pusher)

    async def push_as(self, version: int, pusher: WeightPusher) -> PushReport:
        return await asyncio.to_thread(pusher.push, version, *planned(self.learner.named_parameters(), 1 << 19))

    async def generate(self, index: int, num_tokens: int, temperature: float = 1.0) -> Generation:
        sampling = Sampling(num_tokens, temperature, seed=index)
        return await self.engine.generate(PROMPT, sampling, f"request-{self.version}-{index}")


def worst_difference(
    model: Qwen2ForCausalLM,
    generation: Generation,
    start: int = 0,
    end: int | None = None,
    temperature: float = 1.0,
    prompt: list[int] = PROMPT,
) -> float:
    """Return the largest |behaviour - learner| logprob difference over tokens[start:end], in nats."""
    expected = learner_logprobs(model, prompt + generation.tokens, temperature)[len(prompt) - 1 :]
    return (torch.tensor(generation.logprobs) - expected)[start:end].abs().max().item()


def learner_logprobs(model: Qwen2ForCausalLM, tokens: list[int], temperature: float) -> torch.Tensor:
    """Return the plain transformers logprobs of tokens[1:]."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, :-1].float() / temperature
    logprobs: torch.Tensor = logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    return logprobs
