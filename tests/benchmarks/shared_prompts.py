"""Steps with each prompt computed once and for each sample: `python -m tests.benchmarks.shared_prompts [--short]`.

A step has 4 prompts with 8 answers each, of a dense model of 4.5M parameters, on one thread: GRPO's loss, with and
without a reference for a KL. Prompts of 1,000, 300 and 100 tokens, answers of 128 and of 16 to 1,024. Steps with
learner.share_prompts = true and false alternate; a ratio is the median over pairs. The gradient is that of the first
step, in float32: its difference is the norm of the difference over the norm. --short: one pair of one case, without a
limit of speed. Nothing else may run on the machine.

holds: prompts of 1,000 tokens with answers of 128 train at least 3 times as many samples a second, and no gradient
differs by more than 1e-6.
"""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from learner.data.packing import plan_groups
from learner.models.gradient import Sums, add_gradient
from learner.models.micro_batch import LearnerSample, MicroBatch, make_micro_batch
from learner.models.model_loading import load_model
from learner.models.policy import PolicyEngine
from learner.models.world import join_world
from tests.benchmarks.packing_table import OneProcess
from tests.chaos.rig.verdict import conclude, options
from tests.fakes.policy_settings import small_policy_settings
from tests.fakes.tiny_models import make_tiny_model

_GROUPS, _SAMPLES, _BUDGET, _PAIRS = 4, 8, 8192, 3
_SPEED, _DIFFERENCE = 3.0, 1e-6
# Prompt, shortest and longest answer.
_CASES = {"1000+128": (1000, 128, 128), "300+16..1024": (300, 16, 1024), "100+128": (100, 128, 128)}


def main() -> int:
    arguments = options(__doc__ or "")
    torch.set_num_threads(1)
    join_world(0, 1, "127.0.0.1", 0, timeout_s=60)
    with tempfile.TemporaryDirectory() as name:
        form = {"hidden_size": 256, "num_layers": 4, "vocab_size": 2048, "max_positions": 4096}
        folder = make_tiny_model(Path(name), tied=False, width=0.02, **form)
        settings = small_policy_settings(folder, lr=0.0)
        policy, plain = PolicyEngine(settings), load_model(settings)
        cases, num_pairs = (list(_CASES)[:1], 1) if arguments.short else (list(_CASES), _PAIRS)
        found = {case: _measure(policy, plain, *_CASES[case], arguments.seed, num_pairs) for case in cases}
    for case, (speed, difference, tokens) in found.items():
        print(
            f"{case}: {speed:.2f} times the samples a second, tokens {tokens:.3f}, gradient differs by {difference:.1e}"
        )
    is_fast = arguments.short or found["1000+128"][0] >= _SPEED
    is_equal = all(difference <= _DIFFERENCE for _, difference, _ in found.values())
    return conclude("shared_prompts", is_fast and is_equal, speed=round(found["1000+128"][0], 2))


def _measure(
    policy: PolicyEngine, model: Any, prompt: int, shortest: int, longest: int, seed: int, num_pairs: int
) -> tuple[float, float, float]:
    """Return (median ratio of speeds, difference of the gradients, share of tokens that are computed)."""
    rng = np.random.default_rng(seed)
    samples = list(_samples(rng, prompt, shortest, longest))
    shared, alone = _pack(samples, prompt, share_prompts=True), _pack(samples, prompt, share_prompts=False)
    weight = float(sum(each.num_model_tokens for each in alone))
    ours, theirs = (_gradient(model, parts, weight) for parts in (shared, alone))
    ratios = []
    for _ in range(num_pairs):
        seconds = []
        for parts in (alone, shared):
            start = time.perf_counter()
            policy.step(parts, _loss, weight)
            seconds.append(time.perf_counter() - start)
        ratios.append(seconds[0] / seconds[1])
    tokens = [sum(each.tokens.numel() for each in parts) for parts in (shared, alone)]
    return median(ratios), float((ours - theirs).norm() / theirs.norm()), tokens[0] / tokens[1]


def _gradient(model: Any, parts: list[MicroBatch], weight: float) -> Tensor:
    model.zero_grad()
    add_gradient(OneProcess(model), parts, _loss, 1.0 / weight, temperature=1.0, with_entropy=True)
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def _samples(rng: np.random.Generator, prompt: int, shortest: int, longest: int) -> Iterator[LearnerSample]:
    for _ in range(_GROUPS):
        beginning = rng.integers(0, 2048, prompt)
        for _ in range(_SAMPLES):
            answer = rng.integers(0, 2048, rng.integers(shortest, longest + 1))
            tokens = np.concatenate([beginning, answer]).astype(np.int32)
            mask = np.arange(len(tokens)) >= prompt
            yield LearnerSample(tokens, mask, np.where(mask, -7.6, 0.0).astype(np.float32), float(rng.normal()))


def _pack(samples: list[LearnerSample], prompt: int, *, share_prompts: bool) -> list[MicroBatch]:
    groups = [list(range(first, first + _SAMPLES)) for first in range(0, len(samples), _SAMPLES)]
    prompts = [prompt * share_prompts] * _GROUPS
    ((*plan,),) = plan_groups(groups, [len(sample.tokens) for sample in samples], prompts, 1, _BUDGET)
    return [make_micro_batch([samples[i] for i in part], share_prompts=share_prompts) for part in plan]


def _loss(logprobs: Tensor, entropies: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Sums]:
    ratio = (logprobs - micro_batch.behaviour_logprobs).exp()
    return -(ratio * micro_batch.advantages).sum(), {"tokens": torch.ones_like(logprobs).sum()}


if __name__ == "__main__":
    raise SystemExit(main())
