"""The counts of a run by their names in a status, and outgoing messages."""

from learner.coordinator.accounts import Mailbox, Tally
from protocol.wire import messages as m


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


def test_release_tells_of_more_groups_than_a_message_holds_in_several() -> None:
    mailbox = Mailbox("r1", 1)
    names = [f"g{i}" for i in range(m.MAX_GROUPS + 1)]
    mailbox.release({"s1": names, "s2": names[:1]})
    told = [(server, message.groups) for server, message, _ in mailbox.take() if isinstance(message, m.GroupsTrained)]
    assert told == [("s1", names[:-1]), ("s1", names[-1:]), ("s2", names[:1])]
