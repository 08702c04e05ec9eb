"""The counts of a run, and what a status calls them."""

from learner.coordinator.accounts import Tally


def test_counts_hold_what_has_happened_under_the_names_of_a_status() -> None:
    tally = Tally(retried=2, stale=1)
    tally.refused["schema"] += 1
    tally.rejected["nonfinite"] += 3
    tally.unused["lineage"] += 4
    tally.failed["reward:em"] += 5
    assert tally.counts() == {
        "retried": 2,
        "dropped:stale": 1,
        "refused:schema": 1,
        "rejected:nonfinite": 3,
        "unused:lineage": 4,
        "failed:reward:em": 5,
    }
