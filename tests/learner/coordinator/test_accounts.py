"""Outgoing messages."""

from learner.coordinator.accounts import Mailbox
from protocol.wire import messages as m


def test_release_tells_of_more_groups_than_a_message_holds_in_several() -> None:
    mailbox = Mailbox("r1", 1)
    names = [f"g{i}" for i in range(m.MAX_GROUPS + 1)]
    mailbox.release({"s1": names, "s2": names[:1]})
    told = [(server, message.groups) for server, message, _ in mailbox.take() if isinstance(message, m.GroupsTrained)]
    assert told == [("s1", names[:-1]), ("s1", names[-1:]), ("s2", names[:1])]
