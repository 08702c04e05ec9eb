"""What a proof needs of the ranks: all tell what they hold, and rank 0 has a process look at the files."""

from collections.abc import Callable
from dataclasses import dataclass

from learner.checkpoint.told import Told
from learner.rank.proof.proofs import Proofs
from learner.rank.proof.witness import Witness


@dataclass(frozen=True)
class Proving:
    """One on every rank."""

    witness: Witness
    pushed: Callable[[], str]  # the digest of the weights that servers hold, as rank 0 knows it; collective
    proofs: Proofs | None  # rank 0's; None elsewhere

    def tell(self, step: int, policy_version: int) -> Told:
        """Return what the ranks hold. All ranks together."""
        return self.witness.tell(step, policy_version, self.pushed())
