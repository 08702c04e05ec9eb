"""Evaluations: held-out prompts leased beside training, and the mean rewards of what came back.

An evaluation takes no slot of the staleness window; its leases go first. One is under way at a time.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from learner.coordinator.groups.group import Group
from learner.data.group_name import GroupName
from learner.data.prompts import Prompt


@dataclass(frozen=True)
class EvaluationSchedule:
    """After which steps evaluations are due, and which step's line of metrics each is in at the latest.

    Example: with every_steps=25 and last_step=60 they are due at 0, 25, 50 and 60. The one of step 25 runs beside
    training and is in one of the lines 25 to 49. The first and the last are in their own step's line.
    """

    every_steps: int  # 0: none at all
    last_step: int  # run.max_steps

    def is_due(self, step: int) -> bool:
        return self.every_steps > 0 and (step % self.every_steps == 0 or step == self.last_step)

    def reported_by(self, step: int) -> int:
        """Return the last step whose line may carry this step's evaluation: every line carries one at most."""
        if step == 0 or step >= self.last_step:
            return step
        return min((step // self.every_steps + 1) * self.every_steps, self.last_step) - 1


@dataclass
class Evaluation:
    """One pass over the held-out prompts."""

    step: int  # its groups are named by it
    policy_version: int  # of the newest weights when it began
    to_lease: deque[Group]  # groups with samples that nobody makes
    open: dict[str, Group]  # groups that are not ready and not given up, by name
    finished: list[Group] = field(default_factory=list)  # groups that are back whole, with their trajectories
    num_failed: int = 0  # prompts given up: counted, without a score

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
    """The evaluation that has begun and whose means nobody has taken yet, if there is one."""

    def __init__(self, held_out: Sequence[Prompt], num_samples: int) -> None:
        """num_samples: of each prompt at rollout.temperature; a greedy one is added."""
        self._held_out = held_out
        self._num_samples = num_samples
        self._current: Evaluation | None = None

    @property
    def step(self) -> int | None:
        """The step of the evaluation that is under way, or done and not taken yet."""
        return None if self._current is None else self._current.step

    def begin(self, step: int, policy_version: int) -> None:
        """Begin an evaluation in place of the one before it."""
        self._current = start_evaluation(step, policy_version, self._held_out, self._num_samples)

    def progress(self) -> str | None:
        """Return what the evaluation under way waits for; None when none is, or it is done."""
        if self._current is None or self._current.is_done:
            return None
        return (
            f"the evaluation of step {self._current.step}: "
            f"{len(self._current.finished)} of {len(self._held_out)} prompts are back"
        )

    def take_metrics(self) -> dict[str, float]:
        """Return the means of the evaluation that is done and forget it; nothing while none is."""
        if self._current is None or not self._current.is_done:
            return {}
        metrics, self._current = self._current.metrics(), None
        return metrics

    def open_groups(self) -> list[Group]:
        return [] if self._current is None else list(self._current.open.values())

    def find(self, name: str) -> Group | None:
        return None if self._current is None else self._current.open.get(name)

    def next_group(self) -> Group | None:
        """Take the next group to lease out of its queue."""
        while self._current is not None and self._current.to_lease:
            group = self._current.to_lease.popleft()
            if group.name in self._current.open and group.missing:
                return group
        return None

    def release(self, group: Group) -> None:
        """Queue an open group's missing samples for another lease."""
        assert self._current is not None
        if group not in self._current.to_lease:
            self._current.to_lease.append(group)

    def put_back(self, group: Group) -> None:
        """Queue a group again that was taken and could not be leased now."""
        assert self._current is not None
        self._current.to_lease.appendleft(group)

    def close(self, group: Group) -> None:
        """Take an open group out of the evaluation: ready, or given up."""
        assert self._current is not None
        self._current.close(group)

    def status(self) -> str | None:
        """Return how far the evaluation under way is, as "3/8"; None when there is none."""
        if self._current is None or self._current.is_done:
            return None
        return f"{len(self._current.finished)}/{len(self._held_out)}"


def start_evaluation(step: int, policy_version: int, prompts: Sequence[Prompt], num_samples: int) -> Evaluation:
    """Return an evaluation of these prompts with num_samples sampled and one greedy trajectory each."""
    groups = [
        Group(
            name=str(GroupName("eval", step, prompt.uid)),
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
