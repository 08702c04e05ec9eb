"""The run folder's append-only files: metrics.jsonl, one line per step, samples.jsonl, readable trajectories, and
evaluations.jsonl, one line per answer to a held-out prompt.

One process writes them, so lines never mix. A reader may find the last line cut off, after a kill.
"""

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from learner.coordinator.steps.step_batch import StepBatch
from learner.disk.metrics_lines import parse_metrics_line
from protocol.errors import OperatorError
from protocol.failpoints import failpoint


class RunRecord:
    """Appends lines to files of `folder` and flushes each: a killed run leaves whole lines."""

    def __init__(self, folder: Path, samples_per_step: int) -> None:
        self.folder = folder
        self._samples_per_step = samples_per_step
        self._started = time.monotonic()
        self._last_step_at = self._started

    def stamped(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the line of a step that has just ended, with its times.

        A value that was not measured is absent: NaN and infinity are left out, never written.
        """
        now = time.monotonic()
        line: dict[str, float] = {"step": metrics["step"], "policy_version": metrics["policy_version"]}
        line["time_s"] = now - self._started
        line["at_s"] = time.time()
        line |= {key: value for key, value in metrics.items() if math.isfinite(value)}
        if "num_samples" in metrics:
            seconds = now - self._last_step_at
            line["samples_per_s"] = metrics["num_samples"] / seconds
            line["tokens_per_s"] = metrics["num_model_tokens"] / seconds
        return line

    def write_line(self, line: Mapping[str, float]) -> None:
        """Append a line. The next step's speeds count from here: none began while this line was held back."""
        self._last_step_at = time.monotonic()
        self._append("metrics.jsonl", {key: _rounded(value) for key, value in line.items()})

    def newest_step(self) -> int | None:
        """Return the step of the newest line of metrics, None when there is none."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_bytes().splitlines() if path.exists() else []
        newest = parse_metrics_line(lines[-1]) if lines else None
        return None if newest is None else int(newest["step"])

    def write_samples(self, batch: StepBatch) -> None:
        """Append the first samples of a step as token ids with their mask; the report turns them into text."""
        for trajectory in batch.trajectories[:: max(1, len(batch.trajectories) // max(1, self._samples_per_step))][
            : self._samples_per_step
        ]:
            facts = trajectory.facts
            self._append(
                "samples.jsonl",
                {
                    "step": batch.step,
                    "group": facts.group,
                    "reward": facts.reward,
                    "reward_parts": facts.reward_parts,
                    "staleness": batch.policy_version - facts.oldest_version,
                    "finish": facts.finish,
                    "num_prompt_tokens": facts.num_prompt_tokens,
                    "tokens": trajectory.tokens.tolist(),
                    "loss_mask": trajectory.loss_mask.tolist(),
                },
            )

    def write_answers(self, lines: Sequence[Mapping[str, object]]) -> None:
        """Append an evaluation's answers. A start that begins an evaluation again tells them again: the last counts."""
        self._append("evaluations.jsonl", *lines)

    def _append(self, name: str, *lines: Mapping[str, object]) -> None:
        path = self.folder / name
        failpoint("run_record.before_append")
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(line) + "\n" for line in lines))
        except OSError as error:
            raise OperatorError(f"{path} cannot be written: {error.strerror}. Free the disk, then run again.") from None
        failpoint("run_record.after_append")


def _rounded(value: float) -> float:
    """Whole numbers as such; else seven digits, but to the millisecond for Unix times."""
    return value if isinstance(value, int) else float(f"{value:.7g}") if abs(value) < 1e8 else round(value, 3)
