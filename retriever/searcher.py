"""Batches and caches the searches of all requests."""

from collections import OrderedDict
from collections.abc import Sequence

from protocol.http.dynamic_batcher import DynamicBatcher
from retriever.indexes.index import Hit, Index

_BATCH = 64


class Searcher:
    """Searches one index on its own threads, for one event loop.

    Waiting queries are searched as one batch, without duplicates. White space is folded. Hits are cached (LRU).
    """

    def __init__(self, index: Index, num_threads: int = 1, cache_size: int = 10_000) -> None:
        """cache_size: most queries in the cache; the least recently used is dropped."""
        self._index = index
        self._cache: OrderedDict[tuple[str, int], list[Hit]] = OrderedDict()
        self._cache_size = cache_size
        self._batcher: DynamicBatcher[tuple[str, int], list[Hit]] = DynamicBatcher(
            self._search, _BATCH, "search", num_threads
        )
        self.num_cached = 0

    async def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """Return at most topk hits for each query, in their order, best first."""
        keys = [(" ".join(query.split()), topk) for query in queries]
        # Read now: the cache may drop them during the search.
        found = {key: hits for key in keys if (hits := self._look_up(key)) is not None}
        self.num_cached += sum(key in found for key in keys)
        missing = [key for key in dict.fromkeys(keys) if key not in found]
        if missing:
            found.update(zip(missing, await self._batcher.run(missing), strict=True))
            for key in missing:
                self._add_to_cache(key, found[key])
        return [found[key] for key in keys]

    def _search(self, keys: list[tuple[str, int]]) -> list[list[Hit]]:
        # Each topk by itself: an approximate index finds other documents for a larger one.
        hits: dict[tuple[str, int], list[Hit]] = {}
        for topk in {topk for _, topk in keys}:
            queries = list(dict.fromkeys(query for query, each in keys if each == topk))
            hits |= zip(((query, topk) for query in queries), self._index.search(queries, topk), strict=True)
        return [hits[key] for key in keys]

    def _look_up(self, key: tuple[str, int]) -> list[Hit] | None:
        hits = self._cache.get(key)
        if hits is not None:
            self._cache.move_to_end(key)
        return hits

    def _add_to_cache(self, key: tuple[str, int], hits: list[Hit]) -> None:
        self._cache[key] = hits
        if len(self._cache) > self._cache_size:
            self._cache.popitem(last=False)
