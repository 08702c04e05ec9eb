"""Evaluations: held-out prompts leased beside training, and the scores of what came back.

An evaluation takes no slot of the staleness window; its leases go first. One is under way at a time.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from learner.coordinator.groups.eval_answers import answer_lines, metrics_of
from learner.coordinator.groups.group import Group
from learner.coordinator.groups.held_out import HeldOutSet
from learner.data.names import GroupName


@dataclass(frozen=True)
class EvaluationSchedule:
    """After which steps evaluations are due, and which step's line of metrics each is in at the latest.

    Example: with every_steps=25 and last_step=60 they are due at 0, 25, 50 and 60. The one of step 25 runs beside
    training and is in one of the lines 25 to 49. The first and the last are in their own step's line.
    """

    every_steps: int  # 0: none at all
    last_step: int  # run.max_steps
    is_pinned: bool = False  # eval.pin: each is in its own step's line, and no step begins before it is done

    def is_due(self, step: int) -> bool:
        return self.every_steps > 0 and (step % self.every_steps == 0 or step == self.last_step)

    def reported_by(self, step: int) -> int:
        """Return the last step whose line may carry this step's evaluation: every line carries one at most."""
        if step == 0 or step >= self.last_step or self.is_pinned:
            return step
        return min((step // self.every_steps + 1) * self.every_steps, self.last_step) - 1


@dataclass
class Evaluation:
    """One pass over the held-out sets."""

    step: int  # its groups are named by it
    policy_version: int  # of the newest weights when it began
    to_lease: deque[Group]  # groups with samples that nobody makes
    open: dict[str, Group]  # groups that are not ready and not given up, by name
    finished: list[Group] = field(default_factory=list)  # groups that are back whole, with their trajectories
    num_failed: int = 0  # prompts given up: counted, without a score
    sets: Sequence[HeldOutSet] = ()  # the main one first
    set_of: dict[str, int] = field(default_factory=dict)  # name of a group -> place of its set in sets

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

    def finished_of(self, place: int) -> list[Group]:
        """Return the groups of one set that are back whole, in the order of their prompts."""
        by_name = {group.name: group for group in self.finished}
        return [by_name[name] for name, of in self.set_of.items() if of == place and name in by_name]


class Evaluations:
    """The evaluation that has begun and whose means nobody has taken yet, if there is one."""

    def __init__(self, sets: Sequence[HeldOutSet], solved_at: float = 1.0, rewards_since: int = 0) -> None:
        """sets: the main one, whose means are eval_reward and eval_reward_greedy, first. solved_at: eval.solved_at.

        rewards_since: the first step that the present reward endpoints score; 0: they score all steps.
        """
        self._rewards_since = {"eval_rewards_since": float(rewards_since)} if rewards_since else {}
        self._sets = sets
        self._solved_at = solved_at
        self._num_prompts = sum(len(held_out.prompts) for held_out in sets)
        self._current: Evaluation | None = None

    @property
    def step(self) -> int | None:
        """The step of the evaluation that is under way, or done and not taken yet."""
        return None if self._current is None else self._current.step

    def begin(self, step: int, policy_version: int) -> None:
        """Begin an evaluation in place of the one before it."""
        self._current = start_evaluation(step, policy_version, self._sets)

    def progress(self) -> str | None:
        """Return what the evaluation under way waits for; None when none is, or it is done."""
        if self._current is None or self._current.is_done:
            return None
        return (
            f"the evaluation of step {self._current.step}: "
            f"{len(self._current.finished)} of {self._num_prompts} prompts are back"
        )

    def take_result(self) -> tuple[dict[str, float], list[dict[str, object]]]:
        """Return the scores and the answers of the evaluation that is done, and forget it; nothing while none is."""
        if self._current is None or not self._current.is_done:
            return {}, []
        ended, self._current = self._current, None
        parts = [(held_out, ended.finished_of(place)) for place, held_out in enumerate(ended.sets)]
        metrics = {
            "eval_step": ended.step,
            "eval_policy_version": ended.policy_version,
            "eval_failed": ended.num_failed,
            **self._rewards_since,
            **metrics_of(parts, self._solved_at),
        }
        return metrics, answer_lines(ended.step, parts)

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
        return f"{len(self._current.finished)}/{self._num_prompts}"


def start_evaluation(step: int, policy_version: int, sets: Sequence[HeldOutSet]) -> Evaluation:
    """Return an evaluation of these sets: of each prompt the set's samples and one greedy trajectory."""
    groups: list[Group] = []
    set_of: dict[str, int] = {}
    for place, held_out in enumerate(sets):
        for prompt in held_out.prompts:
            uid = f"{held_out.name}:{prompt.uid}" if place else prompt.uid
            groups.append(
                Group(
                    name=str(GroupName("eval", step, uid)),
                    prompt=prompt,
                    kind="eval",
                    epoch=-1,
                    position=-1,
                    num_samples=held_out.num_samples + 1,
                    greedy_indices=frozenset({held_out.num_samples}),
                    temperature=held_out.temperature,
                )
            )
            set_of[groups[-1].name] = place
    by_name = {group.name: group for group in groups}
    return Evaluation(step, policy_version, deque(groups), by_name, sets=sets, set_of=set_of)
