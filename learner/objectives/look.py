"""What is computed before a step's first update, without a gradient: the columns that its updates compare with."""

from collections.abc import Sequence
from dataclasses import replace

from learner.models.roles import Roles
from learner.packing.micro_batch import MicroBatch


def look(micro_batches: Sequence[MicroBatch], roles: Roles, *, with_old: bool) -> list[MicroBatch]:
    """Return the micro-batches with the critic's values, the reference's logprobs and the learner's old logprobs.

    Each where the model is there; with_old: False leaves the learner's out. Collective: every rank has as many
    micro-batches. The columns stay on the CPU.
    """
    found = list(micro_batches)
    if with_old:
        found = [replace(each, old_logprobs=roles.policy.logprobs(each).cpu()) for each in found]
    if (reference := roles.reference) is not None:
        with reference.in_use():
            found = [replace(each, reference_logprobs=reference.logprobs(each).cpu()) for each in found]
    if (critic := roles.critic) is not None:
        found = [replace(each, values=critic.values(each).cpu()) for each in found]
    return found
