"""BM25 over a corpus: build, save, load and search. The only file that knows bm25s.

Scores are the Lucene variant's, computed when the index is built; a search adds up columns of a sparse matrix.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from protocol.errors import OperatorError
from retriever.corpus import Corpus, title_of
from retriever.indexes.index import Hit
from retriever.indexes.words import RULES, words_of

K1 = 1.2
B = 0.5
# Asked for "country X", BM25 without it ranks pages that mention X above the page called X in six searches of seven.
TITLE_WEIGHT = 3
# A policy that repeats itself writes queries of any length, and each further word costs a pass over its documents.
_MAX_QUERY_WORDS = 512
_BLOCK = 128


@contextmanager
def _hidden(module: str) -> Iterator[None]:
    """Make `import module` fail inside the block, unless it was imported before."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # type: ignore[assignment]  # None is how Python spells "this import fails"
    try:
        yield
    finally:
        del sys.modules[module]


# bm25s imports numba where it is installed (with vLLM it is): a second of start-up for a compiler not used here.
with _hidden("numba"):
    import bm25s


class Bm25Index:
    """A searchable index; safe to search from several threads."""

    def __init__(self, scorer: bm25s.BM25) -> None:
        self._scorer = scorer

    @classmethod
    def recipe(cls) -> dict[str, str | int | float]:
        """Return the rules of words and the formula's numbers."""
        return {"words": RULES, "k1": K1, "b": B, "title_weight": TITLE_WEIGHT}

    @classmethod
    def build(cls, corpus: Corpus, scratch: Path | None = None) -> "Bm25Index":
        """Return the index of a corpus, every title counted TITLE_WEIGHT times; scratch is not used.

        Raises: OperatorError when no document holds a word.
        """
        vocabulary: dict[str, int] = {}
        rows = []
        for contents in corpus.contents:
            words = words_of(contents) + words_of(title_of(contents)) * (TITLE_WEIGHT - 1)
            rows.append([vocabulary.setdefault(word, len(vocabulary)) for word in words])
        if not vocabulary:
            raise OperatorError(
                "retriever: no document of the corpus holds a letter or digit, so nothing can be found."
            )
        scorer = bm25s.BM25(k1=K1, b=B, method="lucene", backend="numpy")
        scorer.index((rows, vocabulary), create_empty_token=False, show_progress=False)
        return cls(scorer)

    @classmethod
    def load(cls, folder: Path) -> "Bm25Index":
        """Return the index that `save` wrote. No pickle is read. Raises: OSError or ValueError for damaged files."""
        return cls(bm25s.BM25.load(folder, allow_pickle=False))

    def save(self, folder: Path) -> None:
        """Write the index as .npy and .json files, without pickle."""
        self._scorer.save(folder, allow_pickle=False, show_progress=False)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """Return for each query at most topk documents that share a word with it; scores are above 0.

        Of a query of more than 512 words the first 512 count.
        """
        return [self._search(query, topk) for query in queries]

    def _search(self, query: str, topk: int) -> list[Hit]:
        known = self._scorer.get_tokens_ids(words_of(query)[:_MAX_QUERY_WORDS])
        if not known:
            return []
        scores: NDArray[np.float32] = self._scorer.get_scores_from_ids(known)
        return [Hit(int(row), float(scores[row])) for row in _best_rows(scores, topk)]


def _best_rows(scores: NDArray[np.float32], topk: int) -> Sequence[int]:
    """Return the rows of the topk largest scores above 0. Equal scores are decided by row, not by chance."""
    # The topk largest of the blocks' largest scores are topk different documents: none below the least of them is
    # among the best. What is left to sort is a few dozen of all documents; measured, a sixth of the time.
    largest = np.maximum.reduceat(scores, np.arange(0, len(scores), _BLOCK)) if len(scores) else scores
    bound = np.partition(largest, len(largest) - topk)[len(largest) - topk] if len(largest) > topk else 0.0
    candidates = np.flatnonzero(scores >= bound) if bound > 0 else np.flatnonzero(scores)
    order = np.lexsort((candidates, -scores[candidates]))
    best: list[int] = candidates[order[:topk]].tolist()
    return best
