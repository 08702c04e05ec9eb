"""The policy gradient as a slow loop over single tokens, written from the formulas, and trajectories for it.

The model is a table: logprob of a token = log_softmax(table[token before])[token]. Shapes: V vocabulary.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from protocol.wire.messages import Batch, MiniBatch
from protocol.wire.trajectory import Trajectory, VersionSpan
from tests.protocol.wire.examples import STAMP, example_facts

V = 7
# Rewards of three groups of three; the last says nothing.
REWARDS = ((1.0, 0.0, 0.25), (-2.0, 3.0, 0.5), (0.5, 0.5, 0.5))


def trajectories() -> list[Trajectory]:
    """Return nine trajectories of two turns each with a reply between, of different lengths."""
    rng = np.random.default_rng(3)
    made = []
    for number, reward in enumerate(reward for group in REWARDS for reward in group):
        prompt, first, reply, second = 1 + number % 3, 1 + number, 2, 1 + number % 2
        num_tokens = prompt + first + reply + second
        mask = np.zeros(num_tokens, np.uint8)
        spans = [VersionSpan(prompt, prompt + first, 3), VersionSpan(num_tokens - second, num_tokens, 4)]
        for span in spans:
            mask[span.start : span.end] = 1
        facts = example_facts(
            group=f"g{number // 3}",
            sample_index=number % 3,
            reward=reward,
            num_tokens=num_tokens,
            num_prompt_tokens=prompt,
            version_spans=spans,
        )
        behaviour = np.where(mask, rng.uniform(-4.0, -0.2, num_tokens), 0.0).astype(np.float32)
        made.append(Trajectory(facts, rng.integers(0, V, num_tokens).astype(np.int32), behaviour, mask))
    return made


def batch_of(
    made: Sequence[Trajectory],
    packed: list[list[int]],
    planned: list[int] | None = None,
    *,
    group_size: int = 3,
    sizes: Sequence[int] = (),
) -> Batch:
    """Return a step's batch. planned: None: all of `packed`. sizes: micro-batches of each update; (): one update."""
    parts, first = [], 0
    for size in sizes:
        num_planned = sum(map(len, packed[first : first + size]))
        parts.append(MiniBatch(num_planned=num_planned, num_micro_batches=size))
        first += size
    return Batch(
        **STAMP,
        step=1,
        facts=[trajectory.facts for trajectory in made],
        groups=[[*range(i, i + group_size)] for i in range(0, len(made), group_size)],
        planned=[index for part in packed for index in part] if planned is None else planned,
        micro_batches=packed,
        mini_batches=parts,
    )


def table(seed: int = 0) -> Tensor:
    return torch.randn(V, V, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def slow_advantage(name: str, group: Sequence[float], index: int) -> float:
    mean = sum(group) / len(group)
    if name == "grpo":
        deviation = math.sqrt(sum((reward - mean) ** 2 for reward in group) / (len(group) - 1))
        return (group[index] - mean) / (deviation + 1e-6)
    if name == "dr_grpo":
        return group[index] - mean
    return group[index] - (sum(group) - group[index]) / (len(group) - 1)


def slow_token_loss(
    logprob: Tensor, before: float, behaviour: float, advantage: float, *, loss: str, correction: str, old_logprobs: str
) -> Tensor:
    """Return one token's loss with clip 0.2 and 0.3, dual clip 3, cap 2, band 0.5 to 2.

    before: the token's logprob by the learner before the step.
    """
    now = float(logprob.detach())
    old = behaviour if old_logprobs == "behaviour" else before
    if loss == "ppo":
        ratio = (logprob - old).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.3) * advantage)
        if advantage < 0:
            gain = torch.clamp(gain, min=3.0 * advantage)
    else:
        gain = advantage * logprob
    weight = math.exp((now if old_logprobs == "behaviour" else old) - behaviour)
    if correction == "none":
        return -gain
    corrected = min(weight, 2.0) if correction == "tis" else weight * (0.5 <= weight <= 2.0)
    if loss == "ppo" and old_logprobs == "behaviour":
        corrected /= weight  # the ratio in the loss is this weight already
    return -gain * corrected


def slow_loss(
    logits: Tensor,
    made: Sequence[Trajectory],
    indices: Sequence[int],
    advantage: str,
    before: Tensor | None = None,
    **how: str,
) -> Tensor:
    """Return an update's loss: the mean over the model's tokens of these trajectories.

    before: the table before the step's first update; None: as it is now.
    """
    logprobs = logits.log_softmax(-1)
    first = (logits if before is None else before).detach().log_softmax(-1)
    total, num_tokens = torch.zeros((), dtype=torch.float64), 0
    for number in indices:
        trajectory = made[number]
        value = slow_advantage(advantage, REWARDS[number // 3], number % 3)
        for t, is_written in enumerate(trajectory.loss_mask):
            if is_written:
                place = int(trajectory.tokens[t - 1]), int(trajectory.tokens[t])
                behaviour = float(trajectory.behaviour_logprobs[t])
                total = total + slow_token_loss(logprobs[place], float(first[place]), behaviour, value, **how)
                num_tokens += 1
    return total / num_tokens
