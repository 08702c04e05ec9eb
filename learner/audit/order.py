"""The rule that no prompt was left out or taken twice: positions without gaps, holding the prompts of the prompt order.

The order is `learner.data.prompt_order`'s, made anew from the run's seed and data.
"""

from collections.abc import Iterator

from learner.audit.breach import Breach
from learner.audit.run import AuditedRun
from learner.data.names import GroupName
from learner.data.prompt_order import order_of


def check_order(run: AuditedRun) -> Iterator[Breach]:
    """Yield positions without a prompt, with two, or with another than the run's seed and data give."""
    data = run.settings.data
    order = order_of(run.rows_by_entry or [len(run.uids)], data.weights(), run.settings.run.seed, data.shuffle)
    expected = 0
    previous = ""
    for position, epoch, uid, group in run.rows(
        'SELECT position, epoch, uid, "group" FROM prompts ORDER BY position, "group"'
    ):
        if position < expected:
            problem = f"is at position {position}, " + (f"where {previous} is too" if expected else "before the first")
            yield Breach("positions", problem, group=group)
            continue
        if position > expected:
            yield _gap(expected, position)
        expected, previous = position + 1, group
        due_epoch, index = order.at(position)
        due = str(GroupName("train", due_epoch, run.uids[index]))
        if (epoch, uid, group) != (due_epoch, run.uids[index], due):
            problem = f"is prompt {uid} of epoch {epoch} at position {position}, where the prompt order has {due}"
            yield Breach("prompt_order", problem, group=group)
    given_out = int(run.meta("position") or 0)
    if given_out > expected:
        yield _gap(expected, given_out)
    elif given_out < expected:
        problem = f"says that {given_out} prompts were given out, but one is at position {expected - 1}"
        yield Breach("positions", problem)


def _gap(first: int, end: int) -> Breach:
    which = f"position {first}" if end == first + 1 else f"positions {first} to {end - 1}"
    return Breach("positions", f"given out, but without a prompt: {which}")
