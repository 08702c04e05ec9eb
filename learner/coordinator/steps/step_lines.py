"""The line of metrics of each step, with the evaluation that ended by then. Begins evaluations when they are due.

A step's line is written when the step ends. It is held back while it has to carry an evaluation that is still under
way: the first (step 0 has a line of its own), the last, and one that the next would overtake. No step begins meanwhile.
What is held back or under way stands in the ledger, so that the next start of the run goes on with it.
"""

import json

from learner.coordinator.groups.evaluations import Evaluations, EvaluationSchedule
from learner.coordinator.steps.record import RunRecord
from learner.coordinator.steps.step_batch import StepBatch
from learner.ledger.ledger import HELD_LINE, Ledger

# In the ledger's meta: the step of the evaluation whose means no line has yet, "" when there is none. A run that has
# never begun one has no such entry.
_EVALUATING = "evaluating"


class StepLines:
    """Example: with eval.every_steps=2 and run.max_steps=3, three prompts held out.

    line 0 is written when evaluation 0 is done, then step 1 begins; evaluation 2 begins when step 2 ends, line 2 is
    held back until it is done; line 3 is held back until evaluation 3 is done, then the run ends.
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
        """last_step: the step of the checkpoint that the run resumes from, 0 for a new run."""
        self._record = record
        self._evaluations = evaluations
        self._schedule = schedule
        self._ledger = ledger
        self._held: dict[str, float] | None = None
        self._report_by = 0
        self._resume(last_step, policy_version)

    @property
    def held_step(self) -> int | None:
        """The step whose line is held back until an evaluation is done."""
        return None if self._held is None else int(self._held["step"])

    def add(self, metrics: dict[str, float], batch: StepBatch) -> None:
        """Take in that a step ended: write its line or hold it back, begin the evaluation that is due."""
        step = int(metrics["step"])
        self._held = {**self._record.stamped(metrics), **self._take_evaluation()}
        self._record.write_samples(batch)
        if self._schedule.is_due(step):
            self._begin(step, int(metrics["policy_version"]), self._schedule.reported_by(step))
        self.settle()
        self._keep_held()

    def settle(self) -> str | None:
        """Write the line that is held back, unless it has to wait; returns what for."""
        if self._held is None:
            return None
        if self._evaluations.step is not None and self._held["step"] >= self._report_by:
            if (progress := self._evaluations.progress()) is not None:
                return progress
            self._held |= self._take_evaluation()
        if self._held["step"] == 0:  # it tells of its evaluation alone, which ends now
            self._held = self._record.stamped(self._held)
        self._record.write_line(self._held)
        self._held = None
        self._keep_held()
        return None

    def _resume(self, last_step: int, policy_version: int) -> None:
        """Begin again what an earlier start left undone, on the weights that this start goes on from."""
        evaluating = self._ledger.meta(_EVALUATING)
        is_first = evaluating is None and last_step == 0 and self._schedule.every_steps > 0
        newest = self._record.newest_step()
        if is_first:
            self._held = {"step": 0, "policy_version": policy_version}
        elif held := self._ledger.meta(HELD_LINE):
            line = json.loads(held)
            if newest == line["step"]:  # it was written after the checkpoint was made, its evaluation with it
                evaluating = ""
                self._ledger.set_meta(_EVALUATING, "")
            elif newest == (line["step"] - 1 if line["step"] else None):
                self._held = line
        self._keep_held()
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

    def _keep_held(self) -> None:
        """Have the ledger say which line is held back: a checkpoint may be made before it is written."""
        line = "" if self._held is None else json.dumps(self._held)
        if line != (self._ledger.meta(HELD_LINE) or ""):
            self._ledger.set_meta(HELD_LINE, line)
