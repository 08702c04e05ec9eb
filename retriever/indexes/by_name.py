"""The indexes that `--retriever-name` can choose. A new one is a file beside this one and a line here.

What a kind needs is imported when it is chosen: bm25 needs no torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from protocol.errors import OperatorError
from retriever.indexes.bm25 import Bm25Index
from retriever.indexes.index import IndexKind

if TYPE_CHECKING:
    from retriever.indexes.encoder import Encoder


@dataclass(frozen=True)
class IndexOptions:
    """What the command line says of an index; each kind reads what concerns it."""

    model: str | None = None  # encoder of dense kinds: folder, or name on the Hugging Face hub
    faiss: str = "flat"  # form of a dense index: flat, hnsw or ivf
    faiss_file: Path | None = None  # an index file that the user has; None: the index is built here


def _dense(family: str) -> Callable[[IndexOptions], IndexKind]:
    def kind(options: IndexOptions) -> IndexKind:
        encoder = _encoder(family, options)  # before FAISS is imported: a missing option is told at once
        from retriever.indexes.dense import DenseKind
        from retriever.indexes.faiss_file import FaissFileKind

        if options.faiss_file is not None:
            return FaissFileKind(encoder, options.faiss_file)
        return DenseKind(encoder, options.faiss)

    return kind


def _hybrid(options: IndexOptions) -> IndexKind:
    from retriever.indexes.hybrid import HybridKind

    return HybridKind(Bm25Index, _dense("e5")(options))


def _encoder(family: str, options: IndexOptions) -> "Encoder":
    if options.model is None:
        raise OperatorError(
            f"retriever: --retriever-name {family} needs --retriever-model: a folder with a Hugging Face encoder, or "
            "its name on the hub, such as intfloat/e5-base-v2."
        )
    from retriever.indexes.encoder import Encoder

    return Encoder(options.model, family)


INDEXES: dict[str, Callable[[IndexOptions], IndexKind]] = {
    "bm25": lambda options: Bm25Index,
    "e5": _dense("e5"),
    "bge": _dense("bge"),
    "dense": _dense("dense"),
    "hybrid": _hybrid,
}


def kind_named(name: str, options: IndexOptions | None = None) -> IndexKind:
    """Return how indexes of this name are made. Raises: OperatorError when there is none, or an option is wrong."""
    if name not in INDEXES:
        raise OperatorError(f"retriever: --retriever-name {name} is not known. Choose one of: {', '.join(INDEXES)}.")
    return INDEXES[name](options or IndexOptions())
