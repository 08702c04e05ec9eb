"""The interface of all indexes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from retriever.corpus import Corpus


@dataclass(frozen=True)
class Hit:
    """One search result."""

    row: int  # document's row in the corpus
    score: float  # larger is better; the scale depends on the index


class Index(Protocol):
    """A searchable index of a corpus; safe to search from several threads."""

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """Return at most topk hits for each query, in the order of the queries, best first, ties in corpus order."""
        ...

    def save(self, folder: Path) -> None:
        """Write the index into a folder that already holds the corpus."""
        ...


class IndexKind(Protocol):
    """Builds and loads the indexes of one kind; holds the encoder, if it needs one."""

    def recipe(self) -> Mapping[str, str | int | float]:
        """Return everything except the corpus that determines an index. A changed recipe causes a rebuild."""
        ...

    def build(self, corpus: Corpus, scratch: Path | None = None) -> Index:
        """Return the index of a corpus.

        scratch: folder for partial work, kept for the next attempt at the same index.
        Raises: OperatorError when no document could ever be found.
        """
        ...

    def load(self, folder: Path) -> Index:
        """Return the index that `save` wrote. Raises: OSError or ValueError for damaged files."""
        ...
