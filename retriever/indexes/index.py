"""What every index can do, whatever it searches by."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from retriever.corpus import Corpus


@dataclass(frozen=True)
class Hit:
    """A document that was found."""

    row: int  # of the corpus
    score: float  # larger is better; what it means is the index's


class Index(Protocol):
    """A searchable index of a corpus; safe to search from several threads."""

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """Return at most topk hits for each query, in the order of the queries, best first, ties in corpus order."""
        ...

    def save(self, folder: Path) -> None:
        """Write the index into a folder that holds the corpus's files already."""
        ...


class IndexKind(Protocol):
    """How indexes of one kind are made; it holds what they are made with, such as an encoder."""

    def recipe(self) -> Mapping[str, str | int | float]:
        """Return what decides, beside the corpus, what an index says: one of another recipe is built again."""
        ...

    def build(self, corpus: Corpus, scratch: Path | None = None) -> Index:
        """Return the index of a corpus.

        scratch: folder that another try at the same index is given too, for work that need not be done twice.
        Raises: OperatorError when nothing of it can be found.
        """
        ...

    def load(self, folder: Path) -> Index:
        """Return the index that `save` wrote. Raises: OSError or ValueError for damaged files."""
        ...
