"""Whole policy-gradient steps as slow loops over single tokens, for every loss, correction and aggregation.

Policy and critic are tables, by the token before. What a micro-batch keeps in float32 (advantages, returns, weights) is
rounded here too; all else is float64.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from protocol.wire.messages import Batch
from protocol.wire.trajectory import Trajectory, VersionSpan
from tests.protocol.wire.examples import STAMP, example_facts

V = 7
GAMMA, LAM = 0.9, 0.8
CLIP_LOW, CLIP_HIGH, DUAL = 0.2, 0.3, 3.0
LOW, HIGH = 0.8, 1.25  # of every correction
VALUE_CLIP = 0.05
CONSTANT = 20
# p prompt, m model, r reply; two neighbours are a group.
SHAPES = ("pmmmrrmm", "ppm", "pm", "pmmmmmmmm", "prmrmrm", "pppmrrrm", "pmrm", "pmmmmm")
REWARDS = (1.0, 0.0, 0.5, 0.5, -2.0, 3.0, 0.0, 0.25)


@dataclass(frozen=True)
class How:
    """What is optimised."""

    advantage: str  # grpo: groups of two; gae: with a critic, groups of one
    loss: str
    correction: str
    aggregate: str
    old: str  # policy.old_logprobs


def trajectories(logits: Tensor) -> list[Trajectory]:
    """Return a trajectory of each shape, whose behaviour logprobs lie about the table's."""
    rng, table = np.random.default_rng(5), logits.detach().log_softmax(-1).numpy()
    made = []
    for number, shape in enumerate(SHAPES):
        mask = np.array([letter == "m" for letter in shape])
        tokens = rng.integers(0, V, len(shape)).astype(np.int32)
        behaviour = np.zeros(len(shape), np.float32)
        for place in np.flatnonzero(mask):
            behaviour[place] = table[tokens[place - 1], tokens[place]] + 0.25 * rng.normal()
        facts = example_facts(
            group=f"g{number}",
            sample_index=0,
            reward=REWARDS[number],
            num_tokens=len(shape),
            num_prompt_tokens=len(shape) - len(shape.lstrip("p")),
            version_spans=[VersionSpan(int(place), int(place) + 1, 4) for place in np.flatnonzero(mask)],
        )
        made.append(Trajectory(facts, tokens, behaviour, mask.astype(np.uint8)))
    return made


def batch_of(made: Sequence[Trajectory], advantage: str, micro_batches: list[list[int]]) -> Batch:
    size = 2 if advantage == "grpo" else 1
    groups = [list(range(start, start + size)) for start in range(0, len(made), size)]
    facts, planned = [each.facts for each in made], list(range(len(made)))
    return Batch(**STAMP, step=1, facts=facts, groups=groups, planned=planned, micro_batches=micro_batches)


def places_of(trajectory: Trajectory) -> list[tuple[int, int]]:
    """Return (token before, token) of each model token."""
    tokens = trajectory.tokens.tolist()
    return [(tokens[t - 1], tokens[t]) for t in range(len(tokens)) if trajectory.loss_mask[t]]


def slow_step(
    made: Sequence[Trajectory], logits: Tensor, values: Tensor, how: How, num_updates: int
) -> tuple[list[float], list[float]]:
    """Take the step's updates on all trajectories, down both gradients at rate 1; returns the losses of both."""
    first, before = logits.detach().log_softmax(-1), values.detach().clone()
    advantages = [_advantages(n, made[n], before, how.advantage) for n in range(len(made))]
    of_policy, of_critic = [], []
    for _ in range(num_updates):
        loss = _policy_loss(made, logits, first, advantages, how)
        critic_loss = _critic_loss(made, values, before, advantages)
        for table, total, losses in ((logits, loss, of_policy), (values, critic_loss, of_critic)):
            (gradient,) = torch.autograd.grad(total, table)
            table.data -= gradient
            losses.append(total.item())
    return of_policy, of_critic


def _advantages(number: int, trajectory: Trajectory, values: Tensor, name: str) -> list[float]:
    places = places_of(trajectory)
    if name == "grpo":
        group = REWARDS[number // 2 * 2 : number // 2 * 2 + 2]
        mean = sum(group) / 2
        deviation = math.sqrt(sum((reward - mean) ** 2 for reward in group))
        return [(REWARDS[number] - mean) / (deviation + 1e-6)] * len(places)
    found, following, behind = [], 0.0, 0.0
    for t in reversed(range(len(places))):
        value = float(values[places[t][0]])
        reward = REWARDS[number] if t == len(places) - 1 else 0.0
        behind = reward + GAMMA * following - value + GAMMA * LAM * behind
        following = value
        found.append(behind)
    return found[::-1]


def _policy_loss(
    made: Sequence[Trajectory], logits: Tensor, first: Tensor, advantages: list[list[float]], how: How
) -> Tensor:
    now, counts = logits.log_softmax(-1), [len(each) for each in advantages]
    total = torch.zeros((), dtype=torch.float64)
    for trajectory, of_tokens, count in zip(made, advantages, counts, strict=True):
        places = places_of(trajectory)
        logprobs = [now[place] for place in places]
        behaviour = [float(x) for x in trajectory.behaviour_logprobs[trajectory.loss_mask.astype(bool)]]
        old = behaviour if how.old == "behaviour" else [float(first[place]) for place in places]
        losses = _token_losses(logprobs, old, [float(np.float32(a)) for a in of_tokens], how.loss)
        looked_at = [float(logprob.detach()) for logprob in logprobs] if how.old == "behaviour" else old
        kept = _corrections([math.exp(a - b) for a, b in zip(looked_at, behaviour, strict=True)], how)
        weight = float(np.float32(_weight(how.aggregate, count, counts) * sum(counts))) / sum(counts)
        for loss, factor in zip(losses, kept, strict=True):
            total = total + weight * factor * loss
    return total


def _token_losses(logprobs: list[Tensor], old: list[float], advantages: list[float], name: str) -> list[Tensor]:
    ratios = [(logprob - before).exp() for logprob, before in zip(logprobs, old, strict=True)]
    if name == "gspo":
        mean = torch.stack([logprob - before for logprob, before in zip(logprobs, old, strict=True)]).sum() / len(old)
        ratios = [mean.exp()] * len(old)
    found = []
    for logprob, ratio, advantage in zip(logprobs, ratios, advantages, strict=True):
        if name == "reinforce":
            gain = advantage * logprob
        elif name == "cispo":
            gain = min(float(ratio.detach()), 1.0 + CLIP_HIGH) * advantage * logprob
        else:
            gain = torch.minimum(ratio * advantage, ratio.clamp(1.0 - CLIP_LOW, 1.0 + CLIP_HIGH) * advantage)
            if name == "ppo" and advantage < 0:
                gain = gain.clamp(min=DUAL * advantage)
        found.append(-gain)
    return found


def _corrections(weights: list[float], how: How) -> list[float]:
    if how.correction == "none":
        return [1.0] * len(weights)
    if how.correction == "geo_mask":
        mean = math.exp(sum(map(math.log, weights)) / len(weights))
        return [float(LOW <= mean <= HIGH)] * len(weights)
    # A ratio to the behaviour policy that is in the loss is this weight already.
    is_in_loss = how.old == "behaviour" and how.loss != "reinforce"
    cut = [min(w, HIGH) if how.correction == "tis" else w * (LOW <= w <= HIGH) for w in weights]
    return [c / w if is_in_loss else c for c, w in zip(cut, weights, strict=True)]


def _weight(aggregate: str, count: int, counts: list[int]) -> float:
    if aggregate == "token_mean":
        return 1.0 / sum(counts)
    of_answers = {"seq_mean_token_mean": count, "seq_mean_token_sum": 1, "seq_sum_norm": CONSTANT}
    return 1.0 / (len(counts) * of_answers[aggregate])


def _critic_loss(made: Sequence[Trajectory], values: Tensor, before: Tensor, advantages: list[list[float]]) -> Tensor:
    total, count = torch.zeros((), dtype=torch.float64), 0
    for trajectory, of_tokens in zip(made, advantages, strict=True):
        for (place, _), advantage in zip(places_of(trajectory), of_tokens, strict=True):
            wanted = float(np.float32(advantage + float(before[place])))
            low, high = float(before[place]) - VALUE_CLIP, float(before[place]) + VALUE_CLIP
            total = total + 0.5 * torch.maximum(
                (values[place] - wanted) ** 2, (values[place].clamp(low, high) - wanted) ** 2
            )
            count += 1
    return total / count
