"""Work of several callers done together."""

import asyncio
import threading

import pytest

from protocol.http.dynamic_batcher import DynamicBatcher


class Doubling:
    """Doubles numbers, a batch at a time, once its gate is open; -1 is a number that it cannot double."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.gate = threading.Event()

    def __call__(self, items: list[int]) -> list[int]:
        self.batches.append(items)
        assert self.gate.wait(30)
        if -1 in items:
            raise ValueError("-1 cannot be doubled")
        return [2 * item for item in items]


async def _begun(work: Doubling, number: int) -> None:
    while len(work.batches) < number:
        await asyncio.sleep(0.001)


async def test_what_waits_while_a_batch_runs_makes_the_next_one() -> None:
    work = Doubling()
    batcher = DynamicBatcher(work, 4, "test")
    first = asyncio.ensure_future(batcher.run([1]))
    await _begun(work, 1)
    later = [asyncio.ensure_future(batcher.run([n, n + 1])) for n in (2, 4, 6)]
    await asyncio.sleep(0)
    work.gate.set()
    assert await first == [2]
    assert await asyncio.gather(*later) == [[4, 6], [8, 10], [12, 14]]
    assert work.batches == [[1], [2, 3, 4, 5], [6, 7]]


async def test_items_whose_caller_has_gone_are_left_out() -> None:
    work = Doubling()
    batcher = DynamicBatcher(work, 4, "test")
    first = asyncio.ensure_future(batcher.run([1]))
    await _begun(work, 1)
    gone, stays = asyncio.ensure_future(batcher.run([2])), asyncio.ensure_future(batcher.run([3]))
    await asyncio.sleep(0)
    gone.cancel()
    work.gate.set()
    assert (await first, await stays) == ([2], [6])
    assert work.batches == [[1], [3]]


async def test_bad_item_costs_no_other_its_result() -> None:
    work = Doubling()
    batcher = DynamicBatcher(work, 8, "test")
    first = asyncio.ensure_future(batcher.run([1]))
    await _begun(work, 1)
    bad, good = asyncio.ensure_future(batcher.run([5, -1])), asyncio.ensure_future(batcher.run([3]))
    await asyncio.sleep(0)
    work.gate.set()
    assert await good == [6]
    with pytest.raises(ValueError, match="-1 cannot be doubled"):
        await bad
    assert await first == [2]
    assert await batcher.run([]) == []


async def test_several_threads_run_several_batches_at_once() -> None:
    work = Doubling()
    batcher = DynamicBatcher(work, 1, "test", num_threads=2)
    both = asyncio.ensure_future(batcher.run([1, 2, 3]))
    await _begun(work, 2)
    assert work.batches == [[1], [2]]
    work.gate.set()
    assert await both == [2, 4, 6]


async def test_second_thread_takes_what_comes_while_the_first_is_busy() -> None:
    work = Doubling()
    batcher = DynamicBatcher(work, 1, "test", num_threads=2)
    asked = [asyncio.ensure_future(batcher.run([1]))]
    await _begun(work, 1)
    asked.append(asyncio.ensure_future(batcher.run([2])))
    await _begun(work, 2)
    work.gate.set()
    assert await asyncio.gather(*asked) == [[2], [4]]


async def test_item_that_comes_at_any_moment_is_taken() -> None:
    batcher = DynamicBatcher(lambda items: items, 4, "test")
    asked = []
    async with asyncio.timeout(30):
        for number in range(500):
            # Spins through the loop's turns: one of these comes between a thread's last batch and its end.
            asked.append(asyncio.ensure_future(batcher.run([number])))
            for _ in range(number % 7):
                await asyncio.sleep(0)
            if number % 5 == 0:
                await asked[-1]
                await asyncio.gather(*asked)
        assert await asyncio.gather(*asked) == [[number] for number in range(500)]


async def test_results_of_a_batch_are_given_out_in_several_turns_of_the_loop() -> None:
    work = Doubling()
    batcher = DynamicBatcher(work, 64, "test")
    events: list[str] = []
    loop = asyncio.get_running_loop()

    def turn() -> None:
        events.append("turn")
        if events.count("result") < 64:
            loop.call_soon(turn)

    async def ask(number: int) -> None:
        await batcher.run([number])
        events.append("result")

    asking = [asyncio.ensure_future(ask(number)) for number in range(64)]
    await _begun(work, 1)
    turn()
    work.gate.set()
    await asyncio.gather(*asking)
    together = [len(run) for run in "".join("r" if event == "result" else " " for event in events).split()]
    assert (sum(together), max(together) <= 16) == (64, True)
