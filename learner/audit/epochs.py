"""What became of every prompt of every epoch: trained, skipped, still out, or not given out yet."""

from dataclasses import dataclass

from learner.audit.run import AuditedRun


@dataclass(frozen=True)
class EpochAccount:
    """under_way: given out and not settled, by state. to_come: not given out yet; no loss."""

    epoch: int
    num_prompts: int
    trained: int
    skipped: int
    under_way: dict[str, int]
    to_come: int


def count_epochs(run: AuditedRun) -> list[EpochAccount]:
    """Return one account for each epoch of which a prompt was given out; a run that has not begun has the first."""
    states: dict[int, dict[str, int]] = {0: {}}
    for epoch, state, count in run.rows("SELECT epoch, state, COUNT(*) FROM prompts GROUP BY epoch, state"):
        states.setdefault(epoch, {})[state] = count
    size = len(run.uids)
    return [
        EpochAccount(
            epoch=epoch,
            num_prompts=size,
            trained=counts.get("trained", 0),
            skipped=counts.get("skipped", 0),
            under_way={s: n for s, n in sorted(counts.items()) if s not in ("trained", "skipped")},
            to_come=max(0, size - sum(counts.values())),
        )
        for epoch, counts in sorted(states.items())
    ]
