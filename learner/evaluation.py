"""Evaluations under way: held-out prompts leased beside training, means when all are back.

Used by the coordinator. An evaluation takes no slot of the staleness window and holds up no step; its leases go first.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from learner.groups import Group
from learner.prompts import Prompt


@dataclass
class Evaluation:
    """One pass over the held-out prompts, reported under `step`. Groups that failed for good count, without a score."""

    step: int
    policy_version: int
    to_lease: deque[Group]
    open: dict[str, Group]
    finished: list[Group] = field(default_factory=list)
    num_failed: int = 0

    @property
    def is_done(self) -> bool:
        return not self.open

    def close(self, group: Group) -> None:
        """Take a group out: ready, or given up."""
        del self.open[group.name]
        if group.is_ready:
            self.finished.append(group)
        else:
            self.num_failed += 1

    def metrics(self) -> dict[str, float]:
        """Return mean rewards of the sampled (temperature) and of the greedy trajectories; absent when none is back."""
        facts = [t.facts for group in self.finished for t in group.trajectories.values()]
        sampled = [f.reward for f in facts if not f.is_greedy]
        greedy = [f.reward for f in facts if f.is_greedy]
        metrics: dict[str, float] = {"eval_policy_version": self.policy_version, "eval_failed": self.num_failed}
        if sampled:
            metrics["eval_reward"] = sum(sampled) / len(sampled)
        if greedy:
            metrics["eval_reward_greedy"] = sum(greedy) / len(greedy)
        return metrics


def start_evaluation(step: int, policy_version: int, prompts: Sequence[Prompt], num_samples: int) -> Evaluation:
    """Return an evaluation of these prompts with num_samples sampled and one greedy trajectory each."""
    groups = [
        Group(
            name=f"eval-{step}-{prompt.uid}",
            prompt=prompt,
            kind="eval",
            epoch=-1,
            position=-1,
            num_samples=num_samples + 1,
            greedy_indices=frozenset({num_samples}),
        )
        for prompt in prompts
    ]
    return Evaluation(step, policy_version, deque(groups), {group.name: group for group in groups})
