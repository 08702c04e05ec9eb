"""The outgoing post: what becomes several messages because one may hold only so much."""

from learner.coordinator.groups.group import Group
from learner.coordinator.mailbox import Mailbox
from learner.data.prompts import Prompt
from protocol.wire import messages as m
from tests.protocol.wire.examples import make_trajectory


def test_release_tells_of_more_groups_than_a_message_holds_in_several() -> None:
    mailbox = Mailbox("r1", 1)
    groups = []
    for i in range(m.MAX_GROUPS + 1):
        group = Group(f"g{i}", Prompt(f"p{i}", "a?", "A", {}), "train", 0, i, 1)
        group.receive(make_trajectory(f"g{i}", 0, "s1", version=0))
        groups.append(group)
    mailbox.release(groups)
    told = [message.groups for _, message, _ in mailbox.take() if isinstance(message, m.Trained)]
    assert [len(part) for part in told] == [m.MAX_GROUPS, 1]
    assert told[0] + told[1] == [group.name for group in groups]
