"""From the rewards of a step to the advantages of its model tokens.

shaped_rewards, token_rewards  rewards per trajectory, then on its last model token or on the ends of turns
ReferenceKl                    the penalty against the reference model, in rewards, advantages or the loss
of_groups, of_tokens           advantages from the group's rewards, or along the trajectory's own tokens
whiten_step                    mean 0 and deviation 1 over the step

Shapes: N trajectories of the step, S trajectories and K model tokens of a micro-batch.
"""

import math
import zlib
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from learner.algorithms.advantages.advantage import OfGroups, OfTokens
from learner.algorithms.kl import KL_FORMS, next_coefficient
from learner.algorithms.shaping import RunningMoments, ShapedRewards, shape_rewards
from learner.algorithms.whiten import Reduce, whiten
from learner.models.micro_batch import MicroBatch
from protocol.settings.learner import KlSettings
from protocol.settings.settings import Settings
from protocol.wire.messages import Batch
from protocol.wire.trajectory import TurnReward

_COEFFICIENT = "kl_coefficient"
_BEGAN_AT = "kl_coefficient_of_settings"  # kl.coefficient with which the controller began
_MOMENTS = ("reward_count", "reward_mean", "reward_squares")
_SOURCE = "reward_source"  # CRC-32 of `RewardsSettings.reward_source`
# Finish reasons of truncated trajectories: a turn's token limit, the context limit, the time limit.
_TRUNCATED = ("length", "context", "time")


def shaped_rewards(batch: Batch, settings: Settings, memory: MutableMapping[str, float]) -> ShapedRewards:
    """Return the step's shaped rewards, the same on every rank. memory: keeps the running moments of rewards."""
    facts = batch.facts
    source = float(zlib.crc32(settings.rewards.reward_source(settings.rollout.environment).encode()))
    # Rewards of another source say nothing about these.
    is_same = memory.get(_SOURCE) == source
    count, mean, squares = (memory.get(name, 0.0) if is_same else 0.0 for name in _MOMENTS)
    shaped = shape_rewards(
        torch.tensor([each.reward for each in facts], dtype=torch.float64),
        torch.tensor([each.num_model_tokens for each in facts], dtype=torch.float64),
        torch.tensor([each.finish in _TRUNCATED for each in facts], dtype=torch.bool),
        RunningMoments(count, mean, squares),
        settings.rewards,
        settings.rollout.max_response_tokens,
    )
    if settings.rewards.normalize:
        moments = shaped.moments
        memory[_SOURCE] = source
        memory.update(zip(_MOMENTS, (moments.count, moments.mean, moments.squares), strict=True))
    return shaped


def token_rewards(
    micro_batch: MicroBatch, scores: Tensor, turn_rewards: Sequence[Sequence[TurnReward]] | None = None
) -> Tensor:
    """Return each model token's reward, [K] float64. The rewards of a trajectory sum to its score.

    scores: [N] float64, of the step. turn_rewards: [N], parts of a score that belong to ends of turns; None: none.

    Example: a score of 1.0, of which 0.25 belong to a first turn of two tokens, and a second turn of one token, give
    [0.0, 0.25, 0.75].
    """
    counts = torch.tensor(micro_batch.counts)
    rewards = torch.zeros(int(counts.sum()), dtype=torch.float64)
    last = counts.cumsum(0) - 1
    has_tokens = counts > 0
    numbers = torch.tensor(micro_batch.numbers)[has_tokens]
    rewards[last[has_tokens]] = scores[numbers]
    for place, number in enumerate(micro_batch.numbers if turn_rewards is not None else ()):
        first, count = int(last[place] + 1 - counts[place]), int(counts[place])
        before = micro_batch.predict_at[first : first + count]
        places = micro_batch.position_ids[0, before] + 1  # of its model tokens, in the trajectory
        for turn in turn_rewards[number] if turn_rewards is not None and number >= 0 else ():
            rewards[first + int(torch.searchsorted(places, turn.end - 1))] += turn.reward
            rewards[last[place]] -= turn.reward
    return rewards


def trajectory_sums(micro_batch: MicroBatch, of_tokens: Tensor, num_trajectories: int) -> Tensor:
    """Return the sum over each trajectory's tokens [N], 0 for trajectories of other micro-batches. of_tokens: [K]."""
    sums = torch.zeros(num_trajectories, dtype=torch.float64)
    for number, part in zip(micro_batch.numbers, torch.split(of_tokens, list(micro_batch.counts)), strict=True):
        if number >= 0:
            sums[number] += part.sum()
    return sums


@dataclass(frozen=True)
class ReferenceKl:
    """memory: keeps the coefficient between steps."""

    settings: KlSettings
    memory: MutableMapping[str, float]

    @property
    def coefficient(self) -> float:
        """The coefficient of the settings, or the controller's if there is a target.

        A resume with another kl.coefficient, or of a checkpoint that names none, restarts the controller; one without
        the target drops it.
        """
        given = self.settings.coefficient
        if self.settings.target is None or self.memory.get(_BEGAN_AT) != given:
            return given
        return self.memory.get(_COEFFICIENT, given)

    @property
    def is_in_reward(self) -> bool:
        return self.settings.coefficient > 0.0 and self.settings.place == "reward"

    @property
    def is_in_loss(self) -> bool:
        return self.settings.place == "loss"

    def of_tokens(self, logprobs: Tensor, micro_batch: MicroBatch) -> Tensor | None:
        """Return each token's estimate [K], None where there is no reference."""
        reference = micro_batch.reference_logprobs
        return None if reference is None else KL_FORMS[self.settings.form](logprobs, reference)

    def penalties(self, micro_batch: MicroBatch, place: Literal["reward", "advantage"]) -> Tensor:
        """Return the change of each token's reward or advantage, [K] float64; 0 where the KL is in another place."""
        if not self.settings.coefficient or self.settings.place != place:
            return torch.zeros(micro_batch.num_model_tokens, dtype=torch.float64)
        assert micro_batch.old_logprobs is not None
        kl = self.of_tokens(micro_batch.old_logprobs, micro_batch)
        assert kl is not None
        return -self.coefficient * kl.double()

    def in_loss(self, logprobs: Tensor, micro_batch: MicroBatch) -> Tensor | None:
        """Return the term of each token's loss, [K]; None unless the KL is in the loss."""
        if not self.is_in_loss:
            return None
        kl = self.of_tokens(logprobs, micro_batch)
        return None if kl is None else self.coefficient * kl

    def follow(self, kl: float, num_trajectories: int) -> None:
        """Update the coefficient after a step. kl: mean over the tokens; ignored when not finite."""
        if self.settings.target is None:
            self.memory.pop(_COEFFICIENT, None)
        elif math.isfinite(kl):
            by = self.settings.target, self.settings.horizon
            self.memory[_COEFFICIENT] = next_coefficient(self.coefficient, kl, num_trajectories, *by)
            self.memory[_BEGAN_AT] = self.settings.coefficient


def of_groups(micro_batches: Sequence[MicroBatch], rewards: Tensor, batch: Batch, estimate: OfGroups) -> list[Tensor]:
    """Return the advantages of each micro-batch's tokens, [K] float64. All tokens of a trajectory have the same.

    rewards: [N] float64, of the whole step, because a group may lie on several ranks.
    """
    of_trajectories = torch.zeros(len(batch.facts), dtype=torch.float64)
    for group in batch.groups:
        lengths = torch.tensor([[batch.facts[index].num_model_tokens for index in group]], dtype=torch.float64)
        of_trajectories[group] = estimate(rewards[group][None], lengths)[0].double()  # a user's own may be of any type
    found = []
    for each in micro_batches:
        numbers, counts = torch.tensor(each.numbers), torch.tensor(each.counts)
        has_tokens = counts > 0
        found.append(of_trajectories[numbers[has_tokens]].repeat_interleave(counts[has_tokens]))
    return found


def of_tokens(
    micro_batches: Sequence[MicroBatch], rewards: Sequence[Tensor], estimate: OfTokens, gamma: float, lam: float
) -> list[Tensor]:
    """Return the advantages of each micro-batch's tokens, [K] float64. rewards: per micro-batch, [K] float64."""
    found = []
    for each, of_each in zip(micro_batches, rewards, strict=True):
        counts = list(each.counts)
        values: Sequence[Tensor | None] = (
            [None] * len(counts) if each.values is None else torch.split(each.values.double(), counts)
        )
        parts = [
            estimate(part, value, gamma, lam)
            for part, value in zip(torch.split(of_each, counts), values, strict=True)
            if len(part)
        ]
        found.append(torch.cat([of_each.new_zeros(0), *parts]))
    return found


def whiten_step(micro_batches: Sequence[MicroBatch], advantages: Sequence[Tensor], reduce: Reduce) -> list[Tensor]:
    """Return the advantages with mean 0 and deviation 1 over all tokens of the step's loss, on all ranks."""
    nothing = torch.zeros(0, dtype=torch.float64)
    is_trained = torch.cat([nothing, *[(each.weights > 0.0).double() for each in micro_batches]])
    together = whiten(torch.cat([nothing, *advantages]), reduce, is_trained)
    return list(torch.split(together, [len(part) for part in advantages]))
