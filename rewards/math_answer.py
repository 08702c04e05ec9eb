"""The bundled mathematics scorer: 1 if the answer equals a target as an expression, else 0; uses math-verify.

The answer is the last `<answer>` of the response, else the last `\\boxed{..}`, else the last expression. Several boxes
may also be the parts of a label. An `<answer>` holds one expression, as a label does: a list of guesses is not equal to
one of them. A policy may write expressions that no computer can evaluate, such as 9^9^9^9. So answers are compared in
separate processes with limits on processor time and memory. An answer that exceeds them is not equal.
"""

import asyncio
import functools
from collections.abc import Sequence

from rewards.exact_match import last_answer
from rewards.math_process import as_expression, last_box
from rewards.processes import ProcessDied, ProcessPool, StartFailed
from rewards.sample import Sample, Score, Scorer, ScorerFailure, targets_of


def make_math_scorer(num_processes: int) -> Scorer:
    """Return a scorer that compares at most `num_processes` samples at a time."""
    return functools.partial(_score, ProcessPool(("rewards.math_process",), num_processes))


async def _score(processes: ProcessPool, samples: Sequence[Sample]) -> list[Score]:
    """Return 1.0 or 0.0 per sample. Raises: SampleError for a label without a target."""
    targets = [targets_of(sample.label, index) for index, sample in enumerate(samples)]

    async def score(sample: Sample, accepted: Sequence[str]) -> Score:
        answer = last_answer(sample.text)
        # Short texts between boxes make a set of them for math-verify: right where the label has those parts.
        answers = {last_box(sample.text), sample.text} if answer is None else {as_expression(answer)}
        request = {"answers": sorted(answers), "targets": accepted}
        try:
            is_equal = await processes.call(request)
        except StartFailed as error:
            raise ScorerFailure(None, "StartFailed", f"{error} before its first answer, see this log") from None
        except ProcessDied:  # the kernel ended it at a limit
            is_equal = None
        return Score(1.0 if is_equal else 0.0, logs={"math_undecided": 1.0 if is_equal is None else 0.0})

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(score(*each)) for each in zip(samples, targets, strict=True)]
    return [task.result() for task in tasks]
