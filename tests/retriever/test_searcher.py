"""Searches made together and remembered."""

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

from retriever.indexes.index import Hit
from retriever.searcher import Searcher


class CountingIndex:
    """Finds a query's length `topk` times; notes its batches; waits at its gate."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.gate = threading.Event()
        self.gate.set()

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        self.batches.append(list(queries))
        assert self.gate.wait(30)
        return [[Hit(len(query), float(rank)) for rank in range(topk)] for query in queries]

    def save(self, folder: Path) -> None:
        raise NotImplementedError


def _rows(found: list[list[Hit]]) -> list[list[int]]:
    return [[hit.row for hit in hits] for hits in found]


async def test_waiting_requests_share_a_batch_with_their_own_topk() -> None:
    index = CountingIndex()
    searcher = Searcher(index)
    index.gate.clear()
    first = asyncio.ensure_future(searcher.search(["a"], 1))
    while not index.batches:
        await asyncio.sleep(0.001)
    later = [
        asyncio.ensure_future(searcher.search(["bb", "ccc"], 2)),
        asyncio.ensure_future(searcher.search(["bb"], 1)),
    ]
    await asyncio.sleep(0)
    index.gate.set()
    assert _rows(await first) == [[1]]
    assert [_rows(found) for found in await asyncio.gather(*later)] == [[[2, 2], [3, 3]], [[2]]]
    # Each topk by itself: an approximate index would find other documents for a larger one.
    assert sorted(index.batches) == [["a"], ["bb"], ["bb", "ccc"]]


async def test_cache_drops_the_least_recently_used_query() -> None:
    index = CountingIndex()
    searcher = Searcher(index, cache_size=2)
    for query in ("a", "b b", " b  b\n", "a", "c", "a", "b b"):
        await searcher.search([query], 1)
    assert index.batches == [["a"], ["b b"], ["c"], ["b b"]]
    assert searcher.num_cached == 3
    assert _rows(await searcher.search(["c", "c"], 2)) == [[1, 1], [1, 1]]  # kept for topk 1 alone


async def test_searches_without_a_cache_are_repeated() -> None:
    index = CountingIndex()
    searcher = Searcher(index, cache_size=0)
    assert _rows(await searcher.search(["a", "b", "a"], 1)) == [[1], [1], [1]]
    await searcher.search(["a"], 1)
    assert index.batches == [["a", "b"], ["a"]]
