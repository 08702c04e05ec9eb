"""The outbox: when it sends, resends and forgets items, and how it counts failures. Times in seconds."""

import logging

import pytest

from protocol.wire.messages import Outcome
from rollout.session.outbox import Failure, FailureCounts, FinishedSample, Item, Key, Outbox
from tests.fakes.clock import Clock
from tests.protocol.wire.examples import make_trajectory

KEY, SECOND = Key("g", 0, 1, 1), Key("g", 1, 1, 1)


def _finished(key: Key = KEY, kind: str = "train") -> FinishedSample:
    lease = (key.group, key.sample_index, "s0", 0)
    return FinishedSample(key, make_trajectory(*lease, attempt=key.attempt, incarnation=key.incarnation, kind=kind))


ITEM = _finished()
FAILURE = Failure(KEY, "retriever", "down")


def _sent(*items: Item, keep_s: float = 120.0) -> Outbox:
    """Return an outbox that sent these items at time 0."""
    outbox = Outbox(keep_s=keep_s)
    for item in items:
        assert outbox.put(item)
    assert outbox.due(0.0) == list(items)
    return outbox


def test_same_key_is_refused() -> None:
    outbox = _sent(ITEM)
    assert not outbox.put(_finished())
    assert outbox.put(_finished(Key("g", 0, 1, 2)))
    assert len(outbox) == 2


def test_item_is_resent_after_5_s_without_an_ack() -> None:
    outbox, second = _sent(ITEM), _finished(SECOND)
    outbox.put(second)
    due = {now: outbox.due(now) for now in (2.5, 4.9, 5.0, 7.4, 7.5, 10.0)}
    assert due == {2.5: [second], 4.9: [], 5.0: [ITEM], 7.4: [], 7.5: [second], 10.0: [ITEM]}
    assert len(list(outbox.unanswered_keys())) == 2


def test_accepted_trajectory_is_kept_until_it_is_trained() -> None:
    outbox = _sent(ITEM)
    outbox.acknowledge("g", 0, "accepted")
    assert outbox.due(100.0) == []
    assert (len(outbox), list(outbox.unanswered_keys())) == (1, [])
    outbox.mark_trained(["other", "g"])
    assert len(outbox) == 0


@pytest.mark.parametrize(
    ("item", "outcome"),
    [
        (_finished(kind="eval"), "accepted"),
        (FAILURE, "accepted"),
        (ITEM, "duplicate"),
        (ITEM, "unknown"),
        (ITEM, "rejected"),
        (ITEM, "returned"),
    ],
)
def test_item_that_is_not_for_training_is_forgotten(item: Item, outcome: Outcome) -> None:
    outbox = _sent(item)
    outbox.acknowledge("g", 0, outcome)
    assert (len(outbox), list(outbox.unanswered_keys()), outbox.due(1000.0)) == (0, [], [])


def test_ack_changes_only_the_sent_items_of_its_sample() -> None:
    outbox = Outbox()
    outbox.put(ITEM)
    outbox.acknowledge("g", 0, "unknown")  # not sent yet
    outbox.acknowledge("h", 0, "unknown")
    outbox.put(_finished(SECOND))
    assert len(outbox.due(0.0)) == 2
    outbox.acknowledge("g", 1, "unknown")
    assert (KEY in outbox, SECOND in outbox) == (True, False)


def test_ack_forgets_each_sent_attempt_beside_unsent_ones() -> None:
    sent, waiting = (
        [_finished(Key("g", 0, 1, attempt)) for attempt in numbers] for numbers in (range(9), range(9, 18))
    )
    outbox = _sent(*sent)
    for item in waiting:
        outbox.put(item)
    outbox.acknowledge("g", 0, "unknown")
    assert outbox.due(1.0) == waiting
    assert len(outbox) == len(waiting)


def test_kept_trajectory_is_offered_again_after_keep_s() -> None:
    outbox = _sent(ITEM, keep_s=100.0)
    outbox.acknowledge("g", 0, "accepted")
    assert outbox.due(100.0) == [ITEM]
    outbox.acknowledge("g", 0, "duplicate")
    assert len(outbox) == 1
    assert outbox.due(150.0) == []
    assert outbox.due(200.0) == [ITEM]
    outbox.acknowledge("g", 0, "unknown")
    assert len(outbox) == 0


def test_everything_is_sent_again_to_another_coordinator() -> None:
    kept, sent, waiting = (_finished(Key("g", index, 1, 1)) for index in range(3))
    outbox = _sent(kept, sent)
    outbox.acknowledge("g", 0, "accepted")
    outbox.put(waiting)
    outbox.send_all_again()
    assert outbox.due(1.0) == [kept, sent, waiting]
    assert outbox.due(1000.0) == [kept, sent, waiting]  # each once: the kept item is not offered as well


def test_failures_are_logged_at_once_and_then_each_minute_with_their_number(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    counts = FailureCounts(logging.getLogger("failures"), "s0", clock)
    for clock.now in (100.0, 130.0, 159.9, 160.0, 161.0):
        counts.add("reward:em", "503", "it is repeated")
    counts.add("retriever", "down", "it is repeated")
    lines = [f'reward:em failed  count={number} last="503"' for number in (1, 3)]
    lines.append('retriever failed  count=1 last="down"')
    assert [record.getMessage() for record in caplog.records] == [
        f's0  {line} consequence="it is repeated"' for line in lines
    ]
    assert counts.totals == {"reward:em": 5, "retriever": 1}
