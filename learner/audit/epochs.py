"""What became of every prompt of every epoch: trained, skipped, still out, or not given out yet."""

from dataclasses import dataclass

from learner.audit.run import AuditedRun
from learner.data.filtered import FILTERED

_SETTLED = ("trained", "skipped", "filtered")


@dataclass(frozen=True)
class EpochAccount:
    """How many prompts of one epoch are where; the five add up to num_prompts."""

    epoch: int  # from 0
    num_prompts: int  # rows of the training data; with weighted entries, prompts that were given out
    trained: int  # prompts inside an applied step
    skipped: int  # prompts given up, or of a step that was not applied
    # prompts given out and not settled yet, by the ledger's state: pending, leased, ready, assigned
    under_way: dict[str, int]
    to_come: int  # prompts not given out yet; no loss
    filtered: int = 0  # prompts replaced because of their group's mean score, or not drawn because of an earlier one's


def count_epochs(run: AuditedRun) -> list[EpochAccount]:
    """Return one account for each epoch of which a prompt was given out; a run that has not begun has the first."""
    states: dict[int, dict[str, int]] = {0: {}}
    for epoch, state, count in run.rows(
        "SELECT epoch, CASE WHEN state = 'skipped' AND reason LIKE ? THEN 'filtered' ELSE state END AS fate, COUNT(*) "
        "FROM prompts GROUP BY epoch, fate",
        f"{FILTERED}%",
    ):
        states.setdefault(epoch, {})[state] = count
    # Weighted entries have epochs of their own: what an epoch of all is, they do not say.
    size = len(run.uids) if run.settings.data.weights() is None else 0
    return [
        EpochAccount(
            epoch=epoch,
            num_prompts=size or sum(counts.values()),
            trained=counts.get("trained", 0),
            skipped=counts.get("skipped", 0),
            under_way={s: n for s, n in sorted(counts.items()) if s not in _SETTLED},
            to_come=max(0, size - sum(counts.values())),
            filtered=counts.get("filtered", 0),
        )
        for epoch, counts in sorted(states.items())
    ]
