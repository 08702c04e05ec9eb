"""The indexes that `--retriever-name` can choose, and their command-line options. A new index is a line here.

The libraries of an index are imported when it is chosen: bm25 needs no torch.
"""

import argparse
import sys
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
    """Index options of the command line; each kind reads its own."""

    model: str | None = None  # encoder for dense indexes: folder, or name on the Hugging Face hub
    faiss: str = "flat"  # form of a dense index: flat, hnsw or ivf
    faiss_file: Path | None = None  # user's own index file; None: build the index


def _dense(family: str) -> Callable[[IndexOptions], IndexKind]:
    def kind(options: IndexOptions) -> IndexKind:
        encoder = _encoder(family, options)  # before FAISS is imported: a missing option is reported at once
        from retriever.indexes.dense import DenseKind, FaissFileKind

        if options.faiss_file is not None:
            return FaissFileKind(encoder, options.faiss_file)
        return DenseKind(encoder, options.faiss)

    return kind


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
}


def kind_named(name: str, options: IndexOptions | None = None) -> IndexKind:
    """Return the kind of this name. Raises: OperatorError for an unknown name or a wrong option."""
    if name not in INDEXES:
        raise OperatorError(f"retriever: --retriever-name {name} is not known. Choose one of: {', '.join(INDEXES)}.")
    return INDEXES[name](options or IndexOptions())


def add_index_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options. Names are Search-R1's, with dashes or underscores."""
    add = parser.add_argument
    add("--corpus-path", "--corpus_path", type=Path, required=True, help='JSONL of {"id", "contents"}')
    add("--index-path", "--index_path", type=Path, required=True, help="folder of the index, or your own FAISS file")
    add("--retriever-name", "--retriever_name", default="bm25", help=f"one of: {', '.join(INDEXES)}")
    add("--retriever-model", "--retriever_model", help="encoder of a dense retriever; bm25 uses none")
    add("--faiss-gpu", "--faiss_gpu", action="store_true", help="accepted for Search-R1's scripts; without effect")
    add("--faiss", default="flat", help="type of a dense index: flat (exact), hnsw or ivf")


def index_options(arguments: argparse.Namespace) -> tuple[Path, IndexOptions]:
    """Return the index folder and the options. With a user's FAISS file the folder holds the documents only.

    Raises: OperatorError for an index of Lucene.
    """
    path: Path = arguments.index_path
    if any(path.glob("segments_*")):
        raise OperatorError(
            f"retriever: --index-path {path} is a Lucene index, which only Pyserini reads. Give a new folder: the BM25 "
            "index is built there from --corpus-path, in minutes for millions of passages."
        )
    if arguments.faiss_gpu:
        print("retriever: --faiss_gpu has no effect: FAISS searches on CPUs here, with the same hits", file=sys.stderr)
    file = path if path.is_file() and arguments.retriever_name != "bm25" else None
    folder = path.with_name(f"{path.name}.documents") if file is not None else path
    return folder, IndexOptions(arguments.retriever_model, arguments.faiss, file)
