"""Evaluations: held-out prompts that are leased beside training, and the scores of their samples.

An evaluation holds no slot of the staleness window, and its leases go first. One runs at a time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from learner.coordinator.groups.eval_scores import HeldOutSet, describe_answers, evaluation_metrics
from learner.coordinator.groups.group import Group
from learner.data.prompts import GroupName
from learner.data.text_decoder import TextDecoder


@dataclass(frozen=True)
class EvaluationSchedule:
    """The steps after which evaluations are due, and the last step whose line of metrics may carry each.

    Example: with every_steps=25 and last_step=60 they are due at 0, 25, 50 and 60. The evaluation of step 25 runs
    beside training and is in one of the lines 25 to 49. The first and the last are in their own step's line.
    """

    every_steps: int  # 0: no evaluations
    last_step: int  # run.max_steps
    is_pinned: bool = False  # eval.pin: each is in its own step's line, and the next step waits for it
    has_first: bool = True  # eval.before: one is due at step 0

    def is_due(self, step: int) -> bool:
        if step == 0 and not self.has_first:
            return False
        return self.every_steps > 0 and (step % self.every_steps == 0 or step == self.last_step)

    def reported_by(self, step: int) -> int:
        """Return the last step whose line may carry this step's evaluation: a line carries at most one."""
        if step == 0 or step >= self.last_step or self.is_pinned:
            return step
        return min((step // self.every_steps + 1) * self.every_steps, self.last_step) - 1


@dataclass
class _Evaluation:
    """One pass over the held-out sets."""

    step: int  # part of its groups' names
    policy_version: int  # newest weights when it began
    set_of: dict[str, int]  # name of a group -> place of its set
    finished: dict[str, Group] = field(default_factory=dict)  # whole groups by name
    answers: dict[str, list[dict[str, object]]] = field(default_factory=dict)  # their lines of evaluations.jsonl
    num_failed: int = 0  # skipped prompts, which have no score

    @property
    def is_done(self) -> bool:
        return len(self.finished) + self.num_failed == len(self.set_of)


class Evaluations:
    """The evaluation that is running, or done and not taken yet."""

    def __init__(
        self,
        sets: Sequence[HeldOutSet],
        open_groups: Callable[[Sequence[Group]], None],
        decoder: TextDecoder,
        solved_at: float = 1.0,
    ) -> None:
        """sets: the main set first. solved_at: eval.solved_at.

        open_groups: opens the groups of an evaluation for leases. decoder: makes the answers' texts.
        """
        self._sets = sets
        self._open_groups = open_groups
        self._decoder = decoder
        self._solved_at = solved_at
        self._current: _Evaluation | None = None

    @property
    def step(self) -> int | None:
        """The step of the evaluation that is running, or done and not taken yet."""
        return None if self._current is None else self._current.step

    def begin(self, step: int, policy_version: int) -> None:
        """Start an evaluation in place of the one before it: each prompt's samples and one greedy trajectory."""
        groups, set_of = [], {}
        for place, held_out in enumerate(self._sets):
            for prompt in held_out.prompts:
                uid = f"{held_out.name}:{prompt.uid}" if place else prompt.uid
                group = Group(
                    name=str(GroupName("eval", step, uid)),
                    prompt=prompt,
                    kind="eval",
                    epoch=-1,
                    position=-1,
                    num_samples=held_out.num_samples + 1,
                    greedy_indices=frozenset({held_out.num_samples}),
                    temperature=held_out.temperature,
                )
                groups.append(group)
                set_of[group.name] = place
        self._current = _Evaluation(step, policy_version, set_of)
        self._open_groups(groups)

    def on_closed(self, group: Group, waste: str | None) -> None:
        """Count a group of the running evaluation as finished, or as failed when its prompt was skipped."""
        if self._current is None or group.name not in self._current.set_of:
            return
        if group.is_ready:
            self._current.finished[group.name] = group
            # Group by group: all texts at once would block the coordinator's thread for seconds.
            self._current.answers[group.name] = describe_answers(group, self._decoder)
        else:
            self._current.num_failed += 1

    def progress(self) -> str | None:
        """Return what the running evaluation waits for; None when it is done or there is none."""
        if self._current is None or self._current.is_done:
            return None
        return (
            f"the evaluation of step {self._current.step}: "
            f"{len(self._current.finished)} of {len(self._current.set_of)} prompts are back"
        )

    def status(self) -> str | None:
        """Return the progress of the running evaluation as "3/8"; None when there is none."""
        if self._current is None or self._current.is_done:
            return None
        return f"{len(self._current.finished)}/{len(self._current.set_of)}"

    def take_result(self) -> tuple[dict[str, float], list[dict[str, object]]]:
        """Return the scores and the answers of the finished evaluation, and forget it; nothing if none is done."""
        if self._current is None or not self._current.is_done:
            return {}, []
        ended, self._current = self._current, None
        results = [
            (
                held_out,
                [ended.finished[name] for name, of in ended.set_of.items() if of == place and name in ended.finished],
            )
            for place, held_out in enumerate(self._sets)
        ]
        metrics = {
            "eval/step": ended.step,
            "eval/policy_version": ended.policy_version,
            "eval/failed": ended.num_failed,
            **evaluation_metrics(results, self._solved_at),
        }
        answers = [
            {"step": ended.step, "set": held_out.name, **answer}
            for held_out, groups in results
            for group in groups
            for answer in ended.answers[group.name]
        ]
        return metrics, answers
