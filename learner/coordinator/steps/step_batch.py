"""One step's groups, split over the ranks into micro-batches: decided once for all ranks, without torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from learner.coordinator.groups.group import Group
from learner.data.packing import plan_groups
from protocol.settings.learner import MIN_SHARED_TOKENS, LearnerSettings
from protocol.settings.rewards import RewardsSettings
from protocol.wire.messages import MAX_GROUPS, Batch, MiniBatch
from protocol.wire.trajectory import Trajectory, TrajectoryFacts, encode_facts, join_arrays

# The environment's part of a reward.
_ENVIRONMENT = "environment"
# Ends of truncated conversations: see TrajectoryFacts.finish.
_TRUNCATED = ("length", "turns", "context", "time")


@dataclass(frozen=True)
class StepBatch:
    """The groups of one step, or of a part of it, and each rank's share."""

    step: int
    policy_version: int  # version of the weights before the step
    groups: tuple[Group, ...]
    trajectories: tuple[Trajectory, ...]  # one group after the other
    group_indices: list[list[int]]  # indices into trajectories of each group
    # plan of each update: [rank][micro-batch][index into trajectories]; other trajectories are not in the loss
    plans: list[list[list[list[int]]]]
    part: int | None = None  # number of this part, from 0; None: the step is whole
    is_last: bool = True  # False: another part follows

    def share_of(
        self, rank: int, run_id: str, incarnation: int, request: int, absent: Sequence[str] = ()
    ) -> tuple[Batch, list[bytes]]:
        """Return a rank's message and its frames: all facts, and the arrays of each micro-batch, as `Batch` says.

        request: number of the rank's question. absent: servers that the step's push leaves out.
        """
        micro_batches = [part for plan in self.plans for part in plan[rank]]
        message = Batch(
            run_id=run_id,
            incarnation=incarnation,
            request=request,
            step=self.step,
            facts=self._facts,
            groups=self.group_indices,
            planned=self._loss_indices,
            micro_batches=micro_batches,
            absent=list(absent)[:MAX_GROUPS],
            mini_batches=[
                MiniBatch(num_planned=len(_indices(plan)), num_micro_batches=len(plan[rank])) for plan in self.plans
            ],
            part=UNSET if self.part is None else self.part,
            is_last=UNSET if self.part is None else self.is_last,
            is_joined=True,
        )
        arrays = [frame for part in micro_batches for frame in join_arrays([self.trajectories[i] for i in part])]
        return message, [self.encoded_facts, *arrays]

    @cached_property
    def encoded_facts(self) -> bytes:
        """The facts of all trajectories, encoded once for all ranks."""
        return encode_facts(self._facts)

    @cached_property
    def _facts(self) -> list[TrajectoryFacts]:
        return [trajectory.facts for trajectory in self.trajectories]

    @cached_property
    def _loss_indices(self) -> list[int]:
        return [index for plan in self.plans for index in _indices(plan)]

    @property
    def is_empty(self) -> bool:
        """Whether no trajectory is in the loss."""
        return not any(_indices(plan) for plan in self.plans)


class DataMetrics:
    """The metrics of a step's data. Its groups come in pieces: thousands at once would stop the coordinator's loop."""

    def __init__(self) -> None:
        self._rewards: list[float] = []
        self._oldest_versions: list[int] = []
        self._model_tokens: list[int] = []
        self._num_turns = self._num_truncated = 0
        self._num_groups = self._num_equal = 0
        self._parts: dict[str, list[float]] = {}  # by the name of the reward's part
        self._logs: dict[str, list[float]] = {}
        self._scores: list[float] = []

    def add(self, trajectories: Sequence[Trajectory], groups: Sequence[Group]) -> None:
        """Count the next groups of the step, with their trajectories."""
        facts = [trajectory.facts for trajectory in trajectories]
        self._rewards += [f.reward for f in facts]
        self._oldest_versions += [f.oldest_version for f in facts]
        self._model_tokens += [f.num_model_tokens for f in facts]
        self._num_turns += sum(f.num_turns for f in facts)
        self._num_truncated += sum(f.finish in _TRUNCATED for f in facts)
        self._num_groups += len(groups)
        self._num_equal += sum(group.equal_rewards() for group in groups)
        self._scores += [f.reward_score for f in facts if f.reward_score is not None]
        for columns, rows in (
            (self._parts, [f.reward_parts for f in facts]),
            (self._logs, [f.reward_logs for f in facts]),
        ):
            for row in rows:
                for name, value in row.items():
                    columns.setdefault(name, []).append(value)

    def of_step(self, policy_version: int, settings: RewardsSettings) -> dict[str, float]:
        """Return the metrics of all groups. policy_version: of the step."""
        num_samples = len(self._rewards)
        rewards, model_tokens = np.array(self._rewards), np.array(self._model_tokens)
        staleness = policy_version - np.array(self._oldest_versions)
        metrics = {
            "reward/mean": float(rewards.mean()),
            "reward/std": float(rewards.std()),
            "data/staleness_mean": float(staleness.mean()),
            "data/staleness_max": float(staleness.max()),
            "length/mean": float(model_tokens.mean()),
            "length/turns": self._num_turns / num_samples,
            "data/num_samples": num_samples,
            "data/num_model_tokens": int(model_tokens.sum()),
            "length/truncated_share": self._num_truncated / num_samples,
            **_lengths_by_reward(rewards, model_tokens),
        }
        if self._num_groups:
            metrics["reward/equal_group_share"] = self._num_equal / self._num_groups
        # A missing part of the environment, of a sum or of a mean is 0. With shard a trajectory has one endpoint's
        # part, and the others were not measured. Nor was a part of weight 0 in a sample from before it was added.
        unused = {endpoint.name for endpoint in settings.endpoints if not endpoint.weight}
        for name, parts in sorted(self._parts.items()):
            is_added = name == _ENVIRONMENT or (settings.combine in ("sum", "mean") and name not in unused)
            metrics[f"reward/part/{name}"] = sum(parts) / (num_samples if is_added else len(parts))
        if self._scores:
            metrics["reward/score"] = float(np.mean(self._scores))
        for name, values in sorted(self._logs.items()):
            metrics[f"reward/log/{name}"] = float(np.mean(values))
        return metrics


def join(parts: Sequence[StepBatch]) -> StepBatch:
    """Return the whole step that came in these parts, without the ranks' plans."""
    if len(parts) == 1:
        return parts[0]
    first, indices, start = parts[0], [], 0
    for part in parts:
        indices += [[start + index for index in group] for group in part.group_indices]
        start += len(part.trajectories)
    groups = tuple(group for part in parts for group in part.groups)
    trajectories = tuple(trajectory for part in parts for trajectory in part.trajectories)
    return StepBatch(first.step, first.policy_version, groups, trajectories, indices, [])


def _lengths_by_reward(rewards: NDArray[np.float64], lengths: NDArray[np.int64]) -> dict[str, float]:
    """Return the mean lengths of samples with above-average reward and of the others; nothing for equal rewards."""
    is_better = rewards > rewards.mean() + 1e-8
    if not is_better.any() or is_better.all():
        return {}
    better, worse = float(lengths[is_better].mean()), float(lengths[~is_better].mean())
    return {"length/better": better, "length/worse": worse}


def build_step(
    step: int,
    policy_version: int,
    groups: Sequence[Group],
    settings: LearnerSettings,
    *,
    are_whole: bool = False,
    may_be_empty: bool = False,
) -> StepBatch:
    """Return the step made of these groups, cut into mini-batches, each packed and balanced over the ranks.

    A mini-batch has whole groups, in order: a sample is compared within its own update. With equal_groups = skip,
    groups with equal rewards are left out of the plan, unless all are equal: their advantages are zero. They count as
    trained. The loss then divides by the tokens of the others alone. are_whole: groups are rows to learn: each is whole
    in one micro-batch, and none is left out.
    may_be_empty: all groups may be left out, because the step has other parts.
    """
    trajectories: list[Trajectory] = []
    group_indices: list[list[int]] = []
    for group in groups:
        first = len(trajectories)
        trajectories += group.in_order()
        group_indices.append(list(range(first, len(trajectories))))
    planned = [part for group, part in zip(groups, group_indices, strict=True) if not group.equal_rewards()]
    if settings.equal_groups == "keep" or are_whole or not (planned or may_be_empty):
        planned = group_indices
    lengths = [trajectory.facts.num_tokens for trajectory in trajectories]
    plans = []
    for mini_batch in _cut(planned, settings.num_mini_batches):
        prompts = [_shared_tokens([trajectories[i] for i in group]) * settings.share_prompts for group in mini_batch]
        size = settings.num_ranks, settings.micro_batch_tokens
        plans.append(plan_groups(mini_batch, lengths, prompts, *size, are_whole=are_whole))
    return StepBatch(step, policy_version, tuple(groups), tuple(trajectories), group_indices, plans)


def _shared_tokens(group: Sequence[Trajectory]) -> int:
    """Return the length of the group's prompt; 0 if it is short, or not the same one in all its trajectories."""
    length = group[0].facts.num_prompt_tokens
    if length < MIN_SHARED_TOKENS or len(group) == 1:
        return 0
    prompt = group[0].tokens[:length].tobytes()
    are_equal = all(
        other.facts.num_prompt_tokens == length and other.tokens[:length].tobytes() == prompt for other in group[1:]
    )
    return length if are_equal else 0


def _cut(groups: Sequence[list[int]], num_parts: int) -> list[Sequence[list[int]]]:
    """Return the groups in order, in parts whose sizes differ by at most one group; at least one part."""
    num_parts = max(1, min(num_parts, len(groups)))
    bounds = [len(groups) * part // num_parts for part in range(num_parts + 1)]
    return [groups[start:end] for start, end in pairwise(bounds)]


def _indices(plan: list[list[list[int]]]) -> list[int]:
    return [index for rank in plan for micro_batch in rank for index in micro_batch]
