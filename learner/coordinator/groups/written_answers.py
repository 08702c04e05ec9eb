"""An evaluation that keeps the answers in place of scores: `eval.answers`, which `sluice generate` sets.

It stands where `Evaluations` stands. Each prompt's samples are written as soon as they are back and then forgotten, so
that the number of prompts has no limit. An earlier start's rows are not sampled again.
"""

from collections.abc import Iterator
from itertools import groupby, islice
from pathlib import Path

from learner.coordinator.groups.eval_scores import HeldOutSet
from learner.coordinator.groups.group import Group
from learner.coordinator.groups.open_groups import OpenGroups
from learner.data.answers import Answers, Origin, Sample, append_answers, rows_of
from learner.data.prompts import GroupName
from learner.data.text_decoder import TextDecoder
from protocol.wire.trajectory import Trajectory


class WrittenAnswers:
    """The rows that are missing, in their order. Attached as `Evaluations` is."""

    def __init__(
        self,
        path: Path,
        origin: Origin,
        asked: HeldOutSet,
        decoder: TextDecoder,
        besides: str | None = None,
        num_open: int = 4096,
    ) -> None:
        """besides: as in `Answers`. num_open: most groups at once, which the coordinator walks at every turn.

        Raises: OperatorError when the file has lines of another origin or other prompts, or cannot be read.
        """
        self._path, self._origin, self._asked, self._decoder = path, origin, asked, decoder
        self._besides, self._num_open = besides, num_open
        self._written = rows_of(path, origin, asked.prompts)
        self._rows: dict[str, int] = {}  # name of an open group -> its row
        self._num_failed = 0
        self.step: int | None = None

    def attached_to(self, groups: OpenGroups) -> "WrittenAnswers":
        """Return itself, which opens its rows among these groups."""
        self._groups = groups
        return self

    def begin(self, step: int, policy_version: int) -> None:
        """Open the first missing rows."""
        self.step, self._version = step, policy_version
        self._missing = self._groups_of(step)
        self._open_more()

    def on_closed(self, group: Group, waste: str | None) -> None:
        """Write the samples of a row that is back, or that failed too often."""
        row = self._rows.pop(group.name, None)
        if row is None:
            return
        self._num_failed += not group.is_ready
        append_answers(self._path, self._answers(row, group))
        self._written.add(row)
        if len(self._rows) < self._num_open // 2:
            self._open_more()

    def status(self) -> str | None:
        """Return the progress as "3/8"; None when all rows are written."""
        num = len(self._asked.prompts)
        return f"{len(self._written)}/{num}" if self.step is not None and len(self._written) < num else None

    def progress(self) -> str | None:
        """Return what the run waits for; None when all rows are written."""
        status = self.status()
        return None if status is None else f"the answers to its prompts: {status} are back"

    def take_result(self) -> tuple[dict[str, float], list[dict[str, object]]]:
        """Return the line of metrics when all rows are written, and forget it."""
        if self.step is None or self.status() is not None:
            return {}, []
        step, self.step = self.step, None
        return {"eval/step": step, "eval/policy_version": self._version, "eval/failed": self._num_failed}, []

    def _groups_of(self, step: int) -> Iterator[Group]:
        for row in range(len(self._asked.prompts)):
            if row not in self._written:
                prompt = self._asked.prompts[row]
                group = Group(
                    name=str(GroupName("eval", step, prompt.uid)),
                    prompt=prompt,
                    kind="eval",
                    epoch=-1,
                    position=-1,
                    num_samples=self._asked.num_samples,
                )
                self._rows[group.name] = row
                yield group

    def _open_more(self) -> None:
        self._groups.open_more(list(islice(self._missing, self._num_open - len(self._rows))))

    def _answers(self, row: int, group: Group) -> Answers:
        return Answers(
            row=row,
            uid=group.prompt.uid,
            prompt=group.prompt.prompt,
            label=group.prompt.label,
            besides=self._besides,
            samples=[self._sample(trajectory) for trajectory in group.in_order()],
            failed=None if group.is_ready else group.dead_letter,
            weights=self._origin.weights,
            sampled_by=self._origin.sampled_by,
        )

    def _sample(self, trajectory: Trajectory) -> Sample:
        facts, tokens = trajectory.facts, trajectory.tokens.tolist()
        learnt, end = [], 0
        for is_learnt, run in groupby(trajectory.loss_mask.tolist()):
            start, end = end, end + len(list(run))
            if is_learnt:
                learnt.append((start, end))
        return Sample(
            text=self._decoder.answer(tokens, facts.num_prompt_tokens),
            reward=facts.reward,
            parts=facts.reward_parts,
            finish=facts.finish,
            tokens=tokens,
            learnt=learnt,
        )
