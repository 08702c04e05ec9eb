"""Evaluations under way: held-out prompts leased beside training, means when all are back.

An evaluation takes no slot of the staleness window and holds up no
step; its leases go first.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from learner.coordinator.groups.group import Group
from learner.data.prompts import Prompt


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


class Evaluations:
    """The evaluations under way, by the step that each is reported with."""

    def __init__(self, held_out: Sequence[Prompt], num_samples: int) -> None:
        self._held_out = held_out
        self._num_samples = num_samples
        self._by_step: dict[int, Evaluation] = {}
        self._taken: tuple[int, dict[str, float]] | None = None

    def start(self, step: int, policy_version: int) -> None:
        """Begin a step's evaluation, unless it is under way: rank 0 asks again after a lost answer."""
        if step not in self._by_step:
            self._by_step[step] = start_evaluation(step, policy_version, self._held_out, self._num_samples)

    def progress(self, step: int) -> str | None:
        """Return what a step's evaluation waits for; None when it has ended, or never began."""
        evaluation = self._by_step.get(step)
        if evaluation is None or evaluation.is_done:
            return None
        return f"evaluation: {len(evaluation.finished)} of {len(self._held_out)} prompts are back"

    def was_taken(self, step: int) -> bool:
        return self._taken is not None and self._taken[0] == step

    def take_metrics(self, step: int) -> dict[str, float]:
        """Return a finished evaluation's means; nothing for a step that has none.

        Asked again for the same step, it returns the same.
        """
        if self._taken is not None and self.was_taken(step):
            return self._taken[1]
        evaluation = self._by_step.pop(step, None)
        metrics = evaluation.metrics() if evaluation is not None else {}
        self._taken = (step, metrics)
        return metrics

    def open_groups(self) -> list[Group]:
        return [group for evaluation in self._by_step.values() for group in evaluation.open.values()]

    def find(self, name: str) -> Group | None:
        return next((e.open[name] for e in self._by_step.values() if name in e.open), None)

    def next_group(self) -> Group | None:
        """Take the next group to lease out of its queue."""
        for evaluation in self._by_step.values():
            while evaluation.to_lease:
                group = evaluation.to_lease.popleft()
                if group.name in evaluation.open and group.missing:
                    return group
        return None

    def release(self, group: Group) -> None:
        """Queue an open group's missing samples for another lease."""
        queue = self._of(group).to_lease
        if group not in queue:
            queue.append(group)

    def close(self, group: Group) -> None:
        """Take an open group out of its evaluation: ready, or given up."""
        self._of(group).close(group)

    def status(self) -> str | None:
        """Return how far the oldest evaluation under way is, as "3/8"; None when there is none."""
        evaluation = next((e for e in self._by_step.values() if not e.is_done), None)
        return None if evaluation is None else f"{len(evaluation.finished)}/{len(self._held_out)}"

    def _of(self, group: Group) -> Evaluation:
        return next(e for e in self._by_step.values() if group.name in e.open)


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
