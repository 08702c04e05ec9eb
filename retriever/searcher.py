"""Searches of many requests made together and remembered."""

from collections import OrderedDict
from collections.abc import Sequence

from protocol.http.micro_batches import MicroBatches
from retriever.indexes.index import Hit, Index

_BATCH = 64


class Searcher:
    """Searches one index on threads of its own; of one event loop.

    Queries that wait at the same moment go to the index as one batch, equal ones once. White space is folded, and what
    was found for a query is kept for the next who asks.
    """

    def __init__(self, index: Index, num_threads: int = 1, cache_size: int = 10_000) -> None:
        """cache_size: queries whose hits are kept, those longest not asked for leave first."""
        self._index = index
        self._cache: OrderedDict[tuple[str, int], list[Hit]] = OrderedDict()
        self._cache_size = cache_size
        self._batches: MicroBatches[tuple[str, int], list[Hit]] = MicroBatches(
            self._search, _BATCH, "search", num_threads
        )
        self.num_cached = 0

    async def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """Return at most topk hits for each query, in their order, best first."""
        asked = [(" ".join(query.split()), topk) for query in queries]
        # Taken out now: the cache may have dropped them when the others are back.
        found = {key: hits for key in asked if (hits := self._remembered(key)) is not None}
        self.num_cached += sum(key in found for key in asked)
        missing = [key for key in dict.fromkeys(asked) if key not in found]
        if missing:
            found.update(zip(missing, await self._batches.run(missing), strict=True))
            for key in missing:
                self._remember(key, found[key])
        return [found[key] for key in asked]

    def _search(self, asked: list[tuple[str, int]]) -> list[list[Hit]]:
        distinct = list(dict.fromkeys(query for query, _ in asked))
        hits = dict(zip(distinct, self._index.search(distinct, max(topk for _, topk in asked)), strict=True))
        return [hits[query][:topk] for query, topk in asked]

    def _remembered(self, key: tuple[str, int]) -> list[Hit] | None:
        hits = self._cache.get(key)
        if hits is not None:
            self._cache.move_to_end(key)
        return hits

    def _remember(self, key: tuple[str, int], hits: list[Hit]) -> None:
        self._cache[key] = hits
        if len(self._cache) > self._cache_size:
            self._cache.popitem(last=False)
