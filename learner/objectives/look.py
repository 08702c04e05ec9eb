"""What is computed before a step's first update, without a gradient: the columns that its updates compare with."""

from collections.abc import Sequence
from dataclasses import replace

from learner.models.roles import Roles
from learner.packing.micro_batch import MicroBatch


def look(micro_batches: Sequence[MicroBatch], roles: Roles, *, with_old: bool) -> list[MicroBatch]:
    """Return the micro-batches with the learner's old logprobs, as far as they are asked for.

    Collective: every rank has as many micro-batches. The columns stay on the CPU.
    """
    found = list(micro_batches)
    if with_old:
        found = [replace(each, old_logprobs=roles.policy.logprobs(each).cpu()) for each in found]
    return found
