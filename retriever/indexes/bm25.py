"""BM25 over a corpus: build, save, load and search. The only file that imports bm25s.

Scores are those of the Lucene variant, computed at build time; a search adds up columns of a sparse matrix.
"""

import re
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from protocol.errors import OperatorError
from retriever.corpus import Corpus, title_of
from retriever.indexes.index import Hit

# Part of the index's recipe: an index with other rules is rebuilt.
RULES = "nfkd-lower-alphanumeric-3"
K1 = 1.2
B = 0.5
# Without it, a search for "country X" ranks pages that mention X above the page called X, in six cases of seven.
TITLE_WEIGHT = 3
# A repeating policy writes very long queries, and each word costs a pass over its documents.
_MAX_QUERY_WORDS = 512
_BLOCK = 128
# Vowel signs of Indic and Asian scripts, which belong to the letter before them and are no word characters of `re`.
_SIGNS = "".join(
    sign for sign in map(chr, [*range(0x700, 0x1E00), *range(0xA800, 0xAC00)]) if unicodedata.category(sign)[0] == "M"
)
# Chinese characters, Hiragana, Thai, Lao, Burmese and Khmer have no spaces between words: each letter is a word, as
# Lucene's standard tokenizer has it for the first two.
_SPACELESS = "".join(
    letter
    for letter in map(chr, [*range(0xE00, 0xF00), *range(0x1000, 0x10A0), *range(0x1780, 0x1800)])
    if unicodedata.category(letter) == "Lo"
)
_ALONE = f"\u3005\u3041-\u309f\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0003ffff{_SPACELESS}"
_ASCII_WORD = re.compile(r"[a-z0-9]+")
_WORD = re.compile(rf"[{_ALONE}][{_SIGNS}]*|[^\W_{_ALONE}]+(?:[{_SIGNS}]+[^\W_{_ALONE}]*)*")


@contextmanager
def _hidden(module: str) -> Iterator[None]:
    """Make `import module` fail inside the block, unless it was imported before."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # type: ignore[assignment]  # None makes the import fail
    try:
        yield
    finally:
        del sys.modules[module]


# bm25s imports numba if it is installed (vLLM installs it): one second of start-up for an unused compiler.
with _hidden("numba"):
    import bm25s


class Bm25Index:
    """A searchable index; safe to search from several threads."""

    def __init__(self, scorer: bm25s.BM25) -> None:
        self._scorer = scorer

    @classmethod
    def recipe(cls) -> dict[str, str | int | float]:
        """Return the word rules and the constants of the formula."""
        return {"words": RULES, "k1": K1, "b": B, "title_weight": TITLE_WEIGHT}

    @classmethod
    def build(cls, corpus: Corpus, scratch: Path | None = None) -> "Bm25Index":
        """Return the index of a corpus, with each title counted TITLE_WEIGHT times; scratch is unused.

        Raises: OperatorError when no document holds a word.
        """
        vocabulary: dict[str, int] = {}
        rows = []
        for contents in corpus.contents:
            words = words_of(contents) + words_of(title_of(contents)) * (TITLE_WEIGHT - 1)
            rows.append([vocabulary.setdefault(word, len(vocabulary)) for word in words])
        if not vocabulary:
            raise OperatorError("retriever: no document of the corpus holds a letter or digit. Check --corpus-path.")
        scorer = bm25s.BM25(k1=K1, b=B, method="lucene", backend="numpy")
        scorer.index((rows, vocabulary), create_empty_token=False, show_progress=False)
        return cls(scorer)

    @classmethod
    def load(cls, folder: Path) -> "Bm25Index":
        """Return the index that `save` wrote, without pickle. Raises: OSError or ValueError for damaged files."""
        return cls(bm25s.BM25.load(folder, allow_pickle=False))

    def save(self, folder: Path) -> None:
        """Write the index as .npy and .json files, without pickle."""
        self._scorer.save(folder, allow_pickle=False, show_progress=False)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """Return for each query at most topk documents that share a word with it; scores are above 0.

        Words after the first 512 are ignored.
        """
        return [self._search(query, topk) for query in queries]

    def _search(self, query: str, topk: int) -> list[Hit]:
        known = self._scorer.get_tokens_ids(words_of(query)[:_MAX_QUERY_WORDS])
        if not known:
            return []
        scores: NDArray[np.float32] = self._scorer.get_scores_from_ids(known)
        return [Hit(int(row), float(scores[row])) for row in _best_rows(scores, topk)]


def _best_rows(scores: NDArray[np.float32], topk: int) -> Sequence[int]:
    """Return the rows of the topk largest scores above 0, ties by row."""
    # The topk largest block maxima belong to topk different documents, so smaller scores can be ignored.
    # Measured: sorting the remaining few dozen documents takes a sixth of the time.
    largest = np.maximum.reduceat(scores, np.arange(0, len(scores), _BLOCK)) if len(scores) else scores
    bound = np.partition(largest, len(largest) - topk)[len(largest) - topk] if len(largest) > topk else 0.0
    candidates = np.flatnonzero(scores >= bound) if bound > 0 else np.flatnonzero(scores)
    order = np.lexsort((candidates, -scores[candidates]))
    best: list[int] = candidates[order[:topk]].tolist()
    return best


def words_of(text: str) -> list[str]:
    """Return the words of a document or query: lower case, no accents (NFKD), runs of letters and digits.

    Examples: words_of("Curaçao: CW-531") == ["curacao", "cw", "531"], words_of("第2章") == ["第", "2", "章"],
    words_of("हिंदी किताब") == ["हिंदी", "किताब"], words_of("ไทย") == ["ไ", "ท", "ย"]
    """
    if text.isascii():
        return _ASCII_WORD.findall(text.lower())
    decomposed = unicodedata.normalize("NFKD", text)
    text = "".join(letter for letter in decomposed if not unicodedata.combining(letter))
    return _WORD.findall(text.lower())
