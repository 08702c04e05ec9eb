"""A word index and a vector index of one corpus, combined by rank.

A document's score is the sum of 1 / (60 + rank) over the indexes that found it, ranks from 1. Scores of different
indexes are not comparable; ranks are.
Source: reciprocal rank fusion, Cormack, Clarke and Buettcher, SIGIR 2009.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from retriever.corpus import Corpus
from retriever.indexes.index import Hit, Index, IndexKind

_RANK_OFFSET = 60
# Candidates of each index per requested document: a document found by both beats a document found by one.
_DEPTH = 5


class HybridIndex:
    """Two indexes searched as one."""

    def __init__(self, words: Index, vectors: Index) -> None:
        self._words = words
        self._vectors = vectors

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        depth = _DEPTH * topk
        found = zip(self._words.search(queries, depth), self._vectors.search(queries, depth), strict=True)
        return [fuse_rankings(rankings)[:topk] for rankings in found]

    def save(self, folder: Path) -> None:
        self._words.save(folder)
        self._vectors.save(folder)


class HybridKind:
    """Builds hybrid indexes; the two kinds write different file names."""

    def __init__(self, words: IndexKind, vectors: IndexKind) -> None:
        self._words = words
        self._vectors = vectors

    def recipe(self) -> Mapping[str, str | int | float]:
        return {**self._words.recipe(), **self._vectors.recipe()}

    def build(self, corpus: Corpus, scratch: Path | None = None) -> HybridIndex:
        return HybridIndex(self._words.build(corpus), self._vectors.build(corpus, scratch))

    def load(self, folder: Path) -> HybridIndex:
        return HybridIndex(self._words.load(folder), self._vectors.load(folder))


def fuse_rankings(rankings: Sequence[Sequence[Hit]]) -> list[Hit]:
    """Return the documents of all rankings, best first, ties in corpus order.

    Example: rows [7, 3] and [3]: row 3 has 1/62 + 1/61, row 7 has 1/61.
    """
    scores: defaultdict[int, float] = defaultdict(float)
    for ranking in rankings:
        for rank, hit in enumerate(ranking, start=1):
            scores[hit.row] += 1 / (_RANK_OFFSET + rank)
    return [Hit(row, scores[row]) for row in sorted(scores, key=lambda row: (-scores[row], row))]
