"""The line of metrics of each step, with the evaluation that has ended; starts evaluations when they are due.

A step's line is written when the step ends. It is held back while it must carry a running evaluation: the first, the
last, and one that the next evaluation would overtake. No step begins during that wait. The ledger has the held line and
the running evaluation for the next start.
"""

import json
from collections.abc import Mapping

from learner.coordinator.groups.evaluations import Evaluations, EvaluationSchedule
from learner.coordinator.steps.record import RunRecord, StepLine
from learner.coordinator.steps.step_batch import StepBatch
from learner.ledger.ledger import HELD_LINE, Ledger

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
        evaluations: Evaluations,
        schedule: EvaluationSchedule,
        ledger: Ledger,
        last_step: int,
        policy_version: int,
    ) -> None:
        """last_step: the step of the resumed checkpoint, 0 for a new run."""
        self.held: StepLine | None = None
        self._record = record
        self._evaluations = evaluations
        self._schedule = schedule
        self._ledger = ledger
        self._report_by = 0
        self._resume(last_step, policy_version)

    def add(self, step: int, policy_version: int, metrics: Mapping[str, float], batch: StepBatch) -> None:
        """Write the line of a step that has ended, or hold it back; start the evaluation that is due."""
        self.held = self._record.stamp(step, policy_version, metrics).with_values(self._take_evaluation())
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
        return metrics

    def _save_held(self) -> None:
        """Save the held line in the ledger: a checkpoint may be made before it is written."""
        line = "" if self.held is None else json.dumps(self.held.to_json())
        if line != (self._ledger.meta(HELD_LINE) or ""):
            self._ledger.set_meta(HELD_LINE, line)
