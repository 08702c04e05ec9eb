"""What every part of the coordinator writes to: the ledger, the outgoing post, and the counts that a status shows."""

from collections import Counter
from dataclasses import dataclass, field

from learner.coordinator.mailbox import Mailbox
from learner.ledger.ledger import Ledger


@dataclass
class Tally:
    """How often things happened in this start of the run."""

    skipped: int = 0  # groups given up
    filtered: int = 0  # groups replaced because of their mean score
    retried: int = 0  # times that samples of a group went back to be leased again
    stale: int = 0  # groups made anew because they had grown too old
    lost_leases: int = 0  # leases that their server never got
    resumed: int = 0  # samples that another server was to go on with from their kept turns
    leased_twice: int = 0  # overdue groups that another server got as well
    undeliverable: int = 0  # messages that found no connection
    refused: Counter[str] = field(default_factory=Counter)  # messages not used, by reason
    rejected: Counter[str] = field(default_factory=Counter)  # trajectories that cannot be trained, by reason
    unused: Counter[str] = field(default_factory=Counter)  # trajectories of no use: duplicate, unknown, lineage
    failed: Counter[str] = field(default_factory=Counter)  # samples that a neighbour failed, by neighbour

    def counts(self) -> Counter[str]:
        """Return what has happened at all, as one table: "retried", "rejected:nonfinite" and so on."""
        counts = Counter(
            {
                "skipped": self.skipped,
                "filtered": self.filtered,
                "retried": self.retried,
                "dropped:stale": self.stale,
                "lost_leases": self.lost_leases,
                "resumed": self.resumed,
                "leased_twice": self.leased_twice,
                "undeliverable": self.undeliverable,
            }
        )
        by_key = {"refused": self.refused, "rejected": self.rejected, "unused": self.unused, "failed": self.failed}
        for name, table in by_key.items():
            counts.update({f"{name}:{key}": number for key, number in table.items()})
        return +counts


@dataclass(frozen=True)
class Accounts:
    """One start's ledger, post and counts."""

    ledger: Ledger  # what became of every prompt and trajectory
    mailbox: Mailbox  # messages to send
    tally: Tally  # how often things happened
