"""What the outbox sends when, and when it forgets. Times in seconds."""

import pytest

from rollout.session.outbox import Failure, Finished, Item, Key, Outbox, Outcome
from tests.protocol.wire.examples import make_trajectory

KEY = Key("g", 0, 1, 1)


def _finished(key: Key = KEY, kind: str = "train") -> Finished:
    lease = (key.group, key.sample_index, "s0", 0)
    return Finished(key, make_trajectory(*lease, attempt=key.attempt, incarnation=key.incarnation, kind=kind))


FAILURE = Failure(KEY, "retriever", "down")


def test_outbox_sends_an_item_once() -> None:
    outbox = Outbox()
    item = _finished()
    assert outbox.put(item)
    assert outbox.due(0.0) == [item]
    assert outbox.due(4.9) == []


def test_outbox_refuses_the_same_try_twice() -> None:
    outbox = Outbox()
    outbox.put(_finished())
    assert not outbox.put(_finished())
    assert outbox.put(_finished(Key("g", 0, 1, 2)))
    assert len(outbox) == 2


def test_outbox_sends_again_after_5_s_without_an_ack() -> None:
    outbox = Outbox()
    first, second = _finished(), _finished(Key("g", 1, 1, 1))
    outbox.put(first)
    outbox.due(0.0)
    outbox.put(second)
    outbox.due(2.5)

    assert outbox.due(5.0) == [first]
    assert outbox.due(7.5) == [second]
    assert outbox.due(10.0) == [first]
    assert outbox.num_unanswered == 2


def test_outbox_keeps_an_accepted_trajectory_until_it_is_trained() -> None:
    outbox = Outbox()
    outbox.put(_finished())
    outbox.due(0.0)
    outbox.acknowledge("g", 0, "accepted")

    assert outbox.due(100.0) == []
    assert (len(outbox), outbox.num_unanswered) == (1, 0)
    outbox.mark_trained(["other", "g"])
    assert len(outbox) == 0


@pytest.mark.parametrize("item", [_finished(kind="eval"), FAILURE])
def test_outbox_forgets_what_is_not_trained_on_once_it_was_taken(item: Item) -> None:
    outbox = Outbox()
    outbox.put(item)
    outbox.due(0.0)
    outbox.acknowledge("g", 0, "accepted")
    assert len(outbox) == 0


@pytest.mark.parametrize("outcome", ["duplicate", "unknown", "rejected", "returned"])
def test_outbox_forgets_what_was_not_accepted(outcome: Outcome) -> None:
    outbox = Outbox()
    outbox.put(_finished())
    outbox.due(0.0)
    outbox.acknowledge("g", 0, outcome)
    assert len(outbox) == 0


def test_outbox_ignores_an_ack_for_what_was_not_sent() -> None:
    outbox = Outbox()
    outbox.put(_finished())
    outbox.acknowledge("g", 0, "unknown")
    outbox.acknowledge("h", 0, "unknown")
    assert len(outbox.due(0.0)) == 1


def test_outbox_acknowledges_one_sample_only() -> None:
    outbox = Outbox()
    outbox.put(_finished())
    outbox.put(_finished(Key("g", 1, 1, 1)))
    outbox.due(0.0)
    outbox.acknowledge("g", 1, "unknown")
    assert KEY in outbox
    assert Key("g", 1, 1, 1) not in outbox


def test_outbox_offers_a_kept_trajectory_again_after_keep_s() -> None:
    outbox = Outbox(keep_s=100.0)
    item = _finished()
    outbox.put(item)
    outbox.due(0.0)
    outbox.acknowledge("g", 0, "accepted")

    assert outbox.due(100.0) == [item]
    outbox.acknowledge("g", 0, "duplicate")
    assert len(outbox) == 1
    assert outbox.due(150.0) == []
    assert outbox.due(200.0) == [item]
    outbox.acknowledge("g", 0, "unknown")
    assert len(outbox) == 0


def test_outbox_sends_everything_again_to_another_coordinator() -> None:
    outbox = Outbox()
    kept, sent, waiting = (_finished(Key("g", index, 1, 1)) for index in range(3))
    outbox.put(kept)
    outbox.put(sent)
    outbox.due(0.0)
    outbox.acknowledge("g", 0, "accepted")
    outbox.put(waiting)

    outbox.send_all_again()

    assert outbox.due(1.0) == [kept, sent, waiting]
    assert outbox.due(1000.0) == [kept, sent, waiting]  # each once: what was kept before is not offered besides
