"""The run folder's append-only files: metrics.jsonl, one line per step; samples.jsonl, trajectories to read; and
evaluations.jsonl, one line per answer to a held-out prompt. One process writes them, so lines never mix. After a kill
the last line may be cut off.

A step's line is written when the step ends. It is held back while it must carry a running evaluation: the first, the
last, and one that the next evaluation would overtake. No step begins during that wait. The ledger has the held line and
the running evaluation for the next start.
"""

import json
import math
import mmap
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import msgspec

from learner.coordinator.groups.evaluations import Evaluations, EvaluationSchedule
from learner.coordinator.groups.written_answers import WrittenAnswers
from learner.coordinator.steps.step_batch import StepBatch
from learner.data.recorded import recorded_indices
from learner.data.text_decoder import TextDecoder
from learner.disk.run_folder import parse_metrics_line
from learner.ledger.ledger import HELD_LINE, Ledger
from protocol.disk.files import naming_disk_errors
from protocol.failpoints import failpoint


@dataclass(frozen=True)
class StepLine:
    """A line of metrics.jsonl."""

    step: int
    policy_version: int  # version after the step
    values: dict[str, float]  # the other keys

    def with_values(self, more: Mapping[str, float]) -> "StepLine":
        return replace(self, values={**self.values, **more})

    def to_json(self) -> dict[str, float]:
        return {"step": self.step, "policy_version": self.policy_version, **self.values}

    @classmethod
    def from_json(cls, line: Mapping[str, float]) -> "StepLine":
        values = {k: v for k, v in line.items() if k not in ("step", "policy_version")}
        return cls(int(line["step"]), int(line["policy_version"]), values)


class RunRecord:
    """Appends lines to files of `folder` and flushes each. A line that was cut off is removed before the next one."""

    def __init__(
        self, folder: Path, samples_per_step: int, decoder: TextDecoder | None = None, group_every: int = 0
    ) -> None:
        """group_every: steps from one whole group in samples.jsonl to the next; 0: none."""
        self.folder = folder
        self.decoder = decoder or TextDecoder()
        self._samples_per_step = samples_per_step
        self._group_every = group_every
        self._started, self._began = time.monotonic(), round(time.time(), 3)
        self._last_step_at = self._started

    def stamp(self, step: int, policy_version: int, metrics: Mapping[str, float]) -> StepLine:
        """Return the line of a step that has just ended, with its times.

        A value that was not measured is absent: NaN and infinity are left out, never written.
        """
        now = time.monotonic()
        values = {"time_s": now - self._started, "at_s": time.time()}
        values |= {key: value for key, value in metrics.items() if math.isfinite(value)}
        if "data/num_samples" in metrics:
            seconds = now - self._last_step_at
            values["perf/samples_per_s"] = metrics["data/num_samples"] / seconds
            values["perf/tokens_per_s"] = metrics["data/num_model_tokens"] / seconds
        return StepLine(step, policy_version, values)

    def write_line(self, line: StepLine) -> None:
        """Append a line. The next step's speeds count from here: no step began while this line was held back."""
        self._last_step_at = time.monotonic()
        self._append("metrics.jsonl", {key: _round(value) for key, value in line.to_json().items()})

    def newest_step(self) -> int | None:
        """Return the step of the newest whole line of metrics, None when there is none."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_bytes().rpartition(b"\n")[0].splitlines() if path.exists() else []
        newest = parse_metrics_line(lines[-1]) if lines else None
        return None if newest is None else int(newest["step"])

    def write_samples(self, batch: StepBatch) -> None:
        """Append samples of a step: text to read, and token ids with their mask."""
        labels = {group.name: group.prompt.label_text for group in batch.groups}
        of_step = [each.facts for each in batch.trajectories]
        for index in recorded_indices(of_step, batch.step, self._samples_per_step, self._group_every):
            trajectory = batch.trajectories[index]
            facts = trajectory.facts
            tokens = trajectory.tokens.tolist()
            prompt, response = self.decoder.texts(tokens, (facts.num_prompt_tokens, len(tokens)))
            self._append(
                "samples.jsonl",
                {
                    "step": batch.step,
                    "start": self._began,
                    "group": facts.group,
                    "sample_index": facts.sample_index,
                    "reward": facts.reward,
                    "reward_parts": facts.reward_parts,
                    "staleness": batch.policy_version - facts.oldest_version,
                    "finish": facts.finish,
                    "num_prompt_tokens": facts.num_prompt_tokens,
                    "prompt": prompt,
                    "response": response,
                    "label": labels.get(facts.group, ""),
                    "tokens": tokens,
                    "loss_mask": trajectory.loss_mask.tolist(),
                    "version_spans": [[span.start, span.end, span.version] for span in facts.version_spans],
                    "calls": msgspec.to_builtins(facts.calls),
                    "logprobs": [round(value, 4) for value in trajectory.behaviour_logprobs.tolist()],
                },
            )

    def write_answers(self, lines: Sequence[Mapping[str, object]]) -> None:
        """Append an evaluation's answers. If a start repeats an evaluation, the last answers count."""
        self._append("evaluations.jsonl", *lines)

    def _append(self, name: str, *lines: Mapping[str, object]) -> None:
        path = self.folder / name
        failpoint("run_record.before_append")
        with (
            naming_disk_errors(f"{path} cannot be written", "Free the disk, then run again."),
            path.open("ab+") as file,
        ):
            _drop_torn_line(file)
            file.write("".join(json.dumps(line) + "\n" for line in lines).encode())
        failpoint("run_record.after_append")


def _drop_torn_line(file: BinaryIO) -> None:
    """Remove a last line that a full disk or a kill cut off: the next line would be part of it, and lost with it."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 1))
    if file.read(1) not in (b"", b"\n"):
        with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as content:
            whole = content.rfind(b"\n") + 1
        file.truncate(whole)


def _round(value: float) -> float:
    """Round to seven digits, Unix times to the millisecond; whole numbers stay."""
    return value if isinstance(value, int) else float(f"{value:.7g}") if abs(value) < 1e8 else round(value, 3)


# In the ledger's meta: the step of the evaluation whose scores are in no line yet; "": none; absent before the first.
_EVALUATING = "evaluating"


class StepLines:
    """`held`: the line that waits for an evaluation.

    Example: with eval.every_steps=2 and run.max_steps=3 line 0 is written when evaluation 0 is done, then step 1
    begins. Evaluation 2 begins when step 2 ends, and line 2 is held back until it is done. Line 3 is held back until
    evaluation 3 is done, then the run ends.
    """

    def __init__(
        self,
        record: RunRecord,
        evaluations: Evaluations | WrittenAnswers,
        schedule: EvaluationSchedule,
        ledger: Ledger,
        last_step: int,
        policy_version: int,
        since: Mapping[str, int] | None = None,
    ) -> None:
        """last_step: the step of the resumed checkpoint, 0 for a new run.

        since: metric -> the first step whose held-out scores are comparable with the present ones.
        """
        self.held: StepLine | None = None
        self._record = record
        self._evaluations = evaluations
        self._schedule = schedule
        self._ledger = ledger
        self._report_by = 0
        self._since = {metric: float(step) for metric, step in (since or {}).items()}
        self._resume(last_step, policy_version)

    def add(self, step: int, policy_version: int, metrics: Mapping[str, float], batch: StepBatch) -> None:
        """Write the line of a step that has ended, or hold it back; start the evaluation that is due."""
        # Ranks score held-out rows: their scores are among the metrics of the step.
        of_ranks = self._since if any(name.startswith("eval/") for name in metrics) else {}
        scores = {**of_ranks, **self._take_evaluation()}
        self.held = self._record.stamp(step, policy_version, metrics).with_values(scores)
        self._record.write_samples(batch)
        if self._schedule.is_due(step):
            self._begin(step, policy_version, self._schedule.reported_by(step))
        self.settle()
        self._save_held()

    def settle(self) -> str | None:
        """Write the held line unless it has to wait; returns what it waits for."""
        if self.held is None:
            return None
        if self._evaluations.step is not None and self.held.step >= self._report_by:
            if (progress := self._evaluations.progress()) is not None:
                return progress
            self.held = self.held.with_values(self._take_evaluation())
        if self.held.step == 0:  # it has the evaluation alone, which ends now
            self.held = self._record.stamp(0, self.held.policy_version, self.held.values)
        self._record.write_line(self.held)
        self.held = None
        self._save_held()
        return None

    def _resume(self, last_step: int, policy_version: int) -> None:
        """Restart the evaluation that an earlier start did not finish, on the weights of this start."""
        evaluating = self._ledger.meta(_EVALUATING)
        is_first = evaluating is None and last_step == 0 and self._schedule.is_due(0)
        first_line = 0 if self._schedule.is_due(0) else 1
        newest = self._record.newest_step()
        if is_first:
            self.held = StepLine(0, policy_version, {})
        elif saved := self._ledger.meta(HELD_LINE):
            line = StepLine.from_json(json.loads(saved))
            if newest == line.step:  # written with its evaluation, after the checkpoint was made
                evaluating = ""
                self._ledger.set_meta(_EVALUATING, "")
            elif newest == (line.step - 1 if line.step > first_line else None):
                self.held = line
        self._save_held()
        if is_first or (evaluating and self._schedule.every_steps):
            self._begin(last_step, policy_version, self._schedule.reported_by(last_step))

    def _begin(self, step: int, policy_version: int, report_by: int) -> None:
        self._evaluations.begin(step, policy_version)
        self._report_by = report_by
        self._ledger.set_meta(_EVALUATING, str(step))

    def _take_evaluation(self) -> dict[str, float]:
        metrics, answers = self._evaluations.take_result()
        if metrics:
            self._record.write_answers(answers)
            self._ledger.set_meta(_EVALUATING, "")
        return {**metrics, **self._since} if metrics else {}

    def _save_held(self) -> None:
        """Save the held line in the ledger: a checkpoint may be made before it is written."""
        line = "" if self.held is None else json.dumps(self.held.to_json())
        if line != (self._ledger.meta(HELD_LINE) or ""):
            self._ledger.set_meta(HELD_LINE, line)
