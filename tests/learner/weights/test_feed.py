"""Which links a push waits for, and how much memory its buckets take."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from learner.weights.feed import BucketMemory, Feed, Feeds, pack
from learner.weights.push import WeightPusher
from protocol.weights.wire import TensorMeta
from tests.fakes.planned_weights import plan_buckets
from tests.learner.weights.fake_server import FakeServer
from tests.learner.weights.pushing import make_pusher

_LONG_S = 60.0
_NUM_BUCKETS = 8


def _links(num_links: int) -> tuple[list[Feed], Feeds, list[asyncio.Task[Any]]]:
    """Return feeds of pushes that are under way until they are cancelled."""
    feeds = [Feed() for _ in range(num_links)]
    pushes: list[asyncio.Task[Any]] = [asyncio.create_task(asyncio.sleep(3600)) for _ in feeds]
    return feeds, Feeds(list(zip(pushes, feeds, strict=True))), pushes


async def _take(feed: Feed) -> None:
    await feed.items.get()
    feed.has_sent_one()


async def _given_all_turns(task: asyncio.Task[bool]) -> bool:
    """Return whether a task is done once everything that can go on has."""
    for _ in range(50):
        await asyncio.sleep(0)
    return task.done()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("learner.weights.feed._PATIENCE_S", _LONG_S)


async def test_a_slower_link_is_waited_for() -> None:
    (quick, slow), feeds, _ = _links(2)
    await feeds.put("first")
    await _take(quick)
    second = asyncio.create_task(feeds.put("second"))

    assert not await _given_all_turns(second)
    await _take(slow)
    assert await second
    assert (quick.items.qsize(), slow.items.qsize()) == (1, 1)


async def test_a_link_that_is_behind_holds_up_nobody_and_is_waited_for_when_it_has_caught_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (quick, slow), feeds, _ = _links(2)
    await feeds.put("first")
    await _take(quick)
    monkeypatch.setattr("learner.weights.feed._PATIENCE_S", 0.0)
    monkeypatch.setattr("learner.weights.feed._TIMES", 0.0)
    is_free = [await feeds.put("second")]
    monkeypatch.setattr("learner.weights.feed._PATIENCE_S", _LONG_S)
    await _take(quick)
    is_free += [await feeds.put("third")]
    waiting = slow.items.qsize()
    await _take(quick)
    for _ in range(3):
        await _take(slow)
    is_free += [await feeds.put("fourth")]
    await _take(quick)

    assert (is_free, waiting) == ([False, False, True], 3)
    fifth = asyncio.create_task(feeds.put("fifth"))
    assert not await _given_all_turns(fifth)
    fifth.cancel()


async def test_a_link_that_fails_is_not_waited_for_and_makes_nobody_slow() -> None:
    (failing, slow), feeds, pushes = _links(2)
    await feeds.put("first")
    pushes[0].cancel()
    second = asyncio.create_task(feeds.put("second"))

    assert not await _given_all_turns(second)
    await _take(slow)
    assert await second
    assert failing.items.qsize() == 1


async def test_nobody_is_waited_for_when_all_have_failed() -> None:
    _, feeds, pushes = _links(2)
    await feeds.put("first")
    for push in pushes:
        push.cancel()

    assert await feeds.put("second")


def test_memory_that_was_given_back_is_used_again() -> None:
    plan = plan_buckets([TensorMeta("a", "uint8", (48,))], 100)
    memory = BucketMemory(plan, "cpu")
    first, second = memory.take(48), memory.take(16)
    memory.give_back(second)
    third = memory.take(48)

    assert third.data_ptr() == second.data_ptr() != first.data_ptr()
    assert (len(second), len(third)) == (16, 48)


def test_nothing_of_what_memory_held_before_travels_between_tensors() -> None:
    plan = plan_buckets([TensorMeta("a", "uint8", (5,)), TensorMeta("b", "uint8", (3,))], 100)
    memory = BucketMemory(plan, "cpu")
    memory.give_back(memory.take(8192).fill_(255))
    weights = [("a", torch.ones(5, dtype=torch.uint8)), ("b", torch.ones(3, dtype=torch.uint8))]
    (flat,) = pack(plan, iter([weights]), memory)

    assert flat.tolist() == [1] * 5 + [0] * 4091 + [1] * 3 + [0] * 4093


def test_a_bucket_is_handed_on_only_once_its_device_has_written_it() -> None:
    """Another thread sends it on another stream, which does not wait for the stream of the copies."""
    plan = plan_buckets([TensorMeta("a", "uint8", (5,)), TensorMeta("b", "uint8", (3,))], 5)
    weights = [[("a", torch.ones(5, dtype=torch.uint8))], [("b", torch.ones(3, dtype=torch.uint8))]]
    written: list[int] = []
    packed = pack(plan, iter(weights), BucketMemory(plan, "cpu"), lambda flat: written.append(int(flat.sum())))

    assert [(int(flat.sum()), list(written)) for flat in packed] == [(5, [5]), (3, [5, 3])]


def test_a_push_to_several_servers_takes_the_memory_of_two_buckets(
    pushers: list[WeightPusher], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[int] = set()
    take = BucketMemory.take

    def noted(memory: BucketMemory, num_bytes: int) -> torch.Tensor:
        flat = take(memory, num_bytes)
        seen.add(flat.data_ptr())
        return flat

    monkeypatch.setattr(BucketMemory, "take", noted)
    metas = [TensorMeta(f"w{number}", "float32", (300_000,)) for number in range(_NUM_BUCKETS)]
    servers = [FakeServer("one"), FakeServer("two")]

    def gathered() -> Iterator[list[tuple[str, torch.Tensor]]]:
        for number, meta in enumerate(metas):
            yield [(meta.name, torch.full(meta.shape, float(number)))]

    report = make_pusher(pushers, servers).push(1, plan_buckets(metas, 1), gathered())

    assert report.synced == ("one", "two")
    assert len(seen) == 2
    for server in servers:
        assert [server.weights[f"w{number}"].unique().tolist() for number in range(_NUM_BUCKETS)] == [
            [float(number)] for number in range(_NUM_BUCKETS)
        ]
