"""One optimizer step's groups, split over the ranks into micro-batches.

It is decided once for all ranks: no rank plans for itself. No torch here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from learner.coordinator.groups.group import Group
from learner.packing.plan import plan_step
from protocol.settings.learner import LearnerSettings
from protocol.wire.messages import MAX_GROUPS, Batch
from protocol.wire.trajectory import Trajectory

# The part of a trajectory's reward that its environment gave.
_ENVIRONMENT = "environment"


@dataclass(frozen=True)
class StepBatch:
    """What one step trains on, and which rank takes which part."""

    step: int  # from 1
    policy_version: int  # of the weights that the step starts from
    groups: tuple[Group, ...]  # what the step trains on
    trajectories: tuple[Trajectory, ...]  # of all groups, one group after the other
    group_indices: list[list[int]]  # indices into trajectories that form each group
    # [rank][micro-batch][index into trajectories]; what is in no micro-batch is not in the loss
    plan: list[list[list[int]]]

    def share_of(
        self, rank: int, run_id: str, incarnation: int, request: int, absent: Sequence[str] = ()
    ) -> tuple[Batch, list[bytes]]:
        """Return a rank's message and its trajectories' raw arrays, three frames each.

        request: what it answers. absent: the servers that the step's push is to leave out.
        """
        micro_batches = self.plan[rank]
        message = Batch(
            run_id=run_id,
            incarnation=incarnation,
            request=request,
            step=self.step,
            facts=[t.facts for t in self.trajectories],
            groups=self.group_indices,
            planned=[index for part in self.plan for micro_batch in part for index in micro_batch],
            micro_batches=micro_batches,
            absent=list(absent)[:MAX_GROUPS],
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
        }
        # An environment's reward is added: one that rewards only who wins gave the others 0. So does a part of a sum or
        # mean. With shard a trajectory has one endpoint's part only: the others were not measured.
        for name in sorted({name for f in facts for name in f.reward_parts}):
            parts = [f.reward_parts[name] for f in facts if name in f.reward_parts]
            is_added = name == _ENVIRONMENT or combine in ("sum", "mean")
            metrics[f"reward/{name}"] = sum(parts) / len(facts if is_added else parts)
        return metrics


def build_step(step: int, policy_version: int, groups: Sequence[Group], settings: LearnerSettings) -> StepBatch:
    """Return the step made of these groups, packed and balanced over the ranks.

    With equal_groups = skip, groups that carry no signal are left out of the plan (their gradient is zero anyway),
    unless nothing would be left. They count as trained all the same.
    """
    trajectories: list[Trajectory] = []
    group_indices: list[list[int]] = []
    for group in groups:
        first = len(trajectories)
        trajectories += [group.trajectories[i] for i in sorted(group.trajectories)]
        group_indices.append(list(range(first, len(trajectories))))
    planned = [i for group, part in zip(groups, group_indices, strict=True) if not group.equal_rewards() for i in part]
    if settings.equal_groups == "keep" or not planned:
        planned = list(range(len(trajectories)))
    lengths = [trajectories[i].facts.num_tokens for i in planned]
    plan = plan_step(lengths, settings.num_ranks, settings.micro_batch_tokens)
    indexed = [[[planned[place] for place in part] for part in rank] for rank in plan]
    return StepBatch(step, policy_version, tuple(groups), tuple(trajectories), group_indices, indexed)
