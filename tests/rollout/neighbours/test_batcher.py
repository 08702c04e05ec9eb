"""Batches of requests."""

import asyncio
from collections.abc import Sequence

import pytest

from rollout.neighbours.batcher import Batcher


async def test_full_batches_are_sent_at_once_and_the_rest_after_a_pause() -> None:
    sizes: list[int] = []

    async def send(items: Sequence[int]) -> Sequence[int | Exception]:
        sizes.append(len(items))
        return [10 * item for item in items]

    batcher: Batcher[int, int] = Batcher(4, send)
    assert await asyncio.gather(*(batcher.add(i) for i in range(10))) == [10 * i for i in range(10)]
    assert sizes == [4, 4, 2]


async def test_item_error_is_raised_for_its_item() -> None:
    async def send(items: Sequence[int]) -> Sequence[int | Exception]:
        return [ValueError("odd") if item % 2 else item for item in items]

    batcher: Batcher[int, int] = Batcher(3, send)
    results = await asyncio.gather(*(batcher.add(i) for i in range(3)), return_exceptions=True)
    assert [str(result) for result in results] == ["0", "odd", "2"]


async def test_batch_error_is_raised_for_all_items() -> None:
    async def send(items: Sequence[int]) -> Sequence[int | Exception]:
        raise ValueError("down")

    batcher: Batcher[int, int] = Batcher(2, send)
    results = await asyncio.gather(*(batcher.add(i) for i in range(2)), return_exceptions=True)
    assert [str(result) for result in results] == ["down", "down"]


async def test_batcher_drops_cancelled_items() -> None:
    sent: list[int] = []

    async def send(items: Sequence[int]) -> Sequence[int | Exception]:
        sent.extend(items)
        return list(items)

    batcher: Batcher[int, int] = Batcher(10, send)
    gone = asyncio.create_task(batcher.add(1))
    stays = asyncio.create_task(batcher.add(2))
    await asyncio.sleep(0)
    gone.cancel()
    assert await stays == 2
    assert sent == [2]


@pytest.mark.parametrize("size", [1, 2])  # sent at once, and waiting for another item
async def test_close_cancels_pending_batches(size: int) -> None:
    async def send(items: Sequence[int]) -> Sequence[int | Exception]:
        await asyncio.sleep(60)
        return list(items)

    batcher: Batcher[int, int] = Batcher(size, send)
    waiting = asyncio.create_task(batcher.add(1))
    await asyncio.sleep(0)
    await batcher.close()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(waiting, 5.0)
