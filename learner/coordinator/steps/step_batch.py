"""One optimizer step's groups, split over the ranks into micro-batches.

It is decided once for all ranks: no rank plans for itself. No torch here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from learner.coordinator.groups.group import Group
from learner.data.packing import plan_step
from protocol.settings.learner import LearnerSettings
from protocol.wire.messages import MAX_GROUPS, Batch, MiniBatch
from protocol.wire.trajectory import Trajectory

# The part of a trajectory's reward that its environment gave.
_ENVIRONMENT = "environment"
# How a conversation ends that was not done: see TrajectoryFacts.finish.
_TRUNCATED = ("length", "turns", "context", "time")


@dataclass(frozen=True)
class StepBatch:
    """What one step trains on, and which rank takes which part."""

    step: int  # from 1
    policy_version: int  # of the weights that the step starts from
    groups: tuple[Group, ...]  # what the step trains on
    trajectories: tuple[Trajectory, ...]  # of all groups, one group after the other
    group_indices: list[list[int]]  # indices into trajectories that form each group
    # one for each update: [rank][micro-batch][index into trajectories]; what is in none of them is not in the loss
    plans: list[list[list[list[int]]]]

    def share_of(
        self, rank: int, run_id: str, incarnation: int, request: int, absent: Sequence[str] = ()
    ) -> tuple[Batch, list[bytes]]:
        """Return a rank's message and its trajectories' raw arrays, three frames each.

        request: what it answers. absent: the servers that the step's push is to leave out.
        """
        micro_batches = [part for plan in self.plans for part in plan[rank]]
        message = Batch(
            run_id=run_id,
            incarnation=incarnation,
            request=request,
            step=self.step,
            facts=[t.facts for t in self.trajectories],
            groups=self.group_indices,
            planned=[index for plan in self.plans for index in _indices(plan)],
            micro_batches=micro_batches,
            absent=list(absent)[:MAX_GROUPS],
            mini_batches=[
                MiniBatch(num_planned=len(_indices(plan)), num_micro_batches=len(plan[rank])) for plan in self.plans
            ],
        )
        return message, [frame for part in micro_batches for i in part for frame in self.trajectories[i].to_buffers()]

    def metrics(self, combine: str = "sum") -> dict[str, float]:
        """Return what the data alone says: rewards, staleness, lengths. combine: how parts became rewards."""
        facts = [t.facts for t in self.trajectories]
        rewards = np.array([f.reward for f in facts])
        staleness = self.policy_version - np.array([f.oldest_version for f in facts])
        model_tokens = np.array([int(t.loss_mask.sum()) for t in self.trajectories])
        metrics = {
            "reward_mean": float(rewards.mean()),
            "reward_std": float(rewards.std()),
            "staleness_mean": float(staleness.mean()),
            "staleness_max": float(staleness.max()),
            "response_tokens_mean": float(model_tokens.mean()),
            "turns_mean": float(np.mean([f.num_turns for f in facts])),
            "num_samples": len(facts),
            "num_model_tokens": int(model_tokens.sum()),
            "equal_groups": sum(group.equal_rewards() for group in self.groups),
            "truncated_share": sum(f.finish in _TRUNCATED for f in facts) / len(facts),
            **_lengths_by_reward(rewards, model_tokens),
        }
        if self.groups:
            metrics["equal_group_share"] = metrics["equal_groups"] / len(self.groups)
        # An environment's reward is added: one that rewards only who wins gave the others 0. So does a part of a sum or
        # mean. With shard a trajectory has one endpoint's part only: the others were not measured.
        for name in sorted({name for f in facts for name in f.reward_parts}):
            parts = [f.reward_parts[name] for f in facts if name in f.reward_parts]
            is_added = name == _ENVIRONMENT or combine in ("sum", "mean")
            metrics[f"reward/{name}"] = sum(parts) / len(facts if is_added else parts)
        scores = [f.reward_score for f in facts if f.reward_score is not None]
        if scores:
            metrics["score_mean"] = float(np.mean(scores))
        for name in sorted({name for f in facts for name in f.reward_logs}):
            metrics[f"reward_log/{name}"] = float(
                np.mean([f.reward_logs[name] for f in facts if name in f.reward_logs])
            )
        return metrics


def _lengths_by_reward(rewards: NDArray[np.float64], lengths: NDArray[np.int64]) -> dict[str, float]:
    """Return the mean length of samples of above-average reward and of the others; nothing when all are equal."""
    is_better = rewards > rewards.mean() + 1e-8
    if not is_better.any() or is_better.all():
        return {}
    better, worse = float(lengths[is_better].mean()), float(lengths[~is_better].mean())
    return {"response_tokens_better": better, "response_tokens_worse": worse}


def build_step(step: int, policy_version: int, groups: Sequence[Group], settings: LearnerSettings) -> StepBatch:
    """Return the step made of these groups, cut into mini-batches, each packed and balanced over the ranks.

    A mini-batch is of whole groups, in their order: what a sample is compared with is in its own update.
    With equal_groups = skip, groups that carry no signal are left out of the plan (their gradient is zero anyway),
    unless nothing would be left. They count as trained all the same.
    """
    trajectories: list[Trajectory] = []
    group_indices: list[list[int]] = []
    for group in groups:
        first = len(trajectories)
        trajectories += [group.trajectories[i] for i in sorted(group.trajectories)]
        group_indices.append(list(range(first, len(trajectories))))
    planned = [part for group, part in zip(groups, group_indices, strict=True) if not group.equal_rewards()]
    if settings.equal_groups == "keep" or not planned:
        planned = group_indices
    plans = []
    for mini_batch in _cut(planned, settings.num_mini_batches):
        indices = [index for part in mini_batch for index in part]
        lengths = [trajectories[index].facts.num_tokens for index in indices]
        plan = plan_step(lengths, settings.num_ranks, settings.micro_batch_tokens)
        plans.append([[[indices[place] for place in part] for part in rank] for rank in plan])
    return StepBatch(step, policy_version, tuple(groups), tuple(trajectories), group_indices, plans)


def _cut(groups: Sequence[list[int]], num_parts: int) -> list[Sequence[list[int]]]:
    """Return the groups in their order, in parts of equal size but for one group; fewer parts when there are fewer."""
    num_parts = min(num_parts, len(groups))
    bounds = [len(groups) * part // num_parts for part in range(num_parts + 1)]
    return [groups[start:end] for start, end in pairwise(bounds)]


def _indices(plan: list[list[list[int]]]) -> list[int]:
    return [index for rank in plan for micro_batch in rank for index in micro_batch]
