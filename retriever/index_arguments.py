"""The options that say which index: of `retriever.serve` and of `retriever.build`."""

import argparse
from pathlib import Path

from retriever.indexes.by_name import INDEXES, IndexOptions


def add_index_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options. Names are those of Search-R1's servers, with dashes or underscores."""
    add = parser.add_argument
    add("--corpus-path", "--corpus_path", type=Path, required=True, help='JSONL of {"id", "contents"}')
    add("--index-path", "--index_path", type=Path, required=True, help="folder of the index, or a FAISS file of yours")
    add("--retriever-name", "--retriever_name", default="bm25", help=f"one of: {', '.join(INDEXES)}")
    add("--retriever-model", "--retriever_model", help="encoder of a dense retriever; bm25 uses none")
    add("--faiss", default="flat", help="form of a dense index that is built: flat (exact), hnsw or ivf")


def index_options(arguments: argparse.Namespace) -> tuple[Path, IndexOptions]:
    """Return the folder that the index is kept in, and what it is made with.

    Beside a FAISS file of the user's that folder holds its documents alone.
    """
    path: Path = arguments.index_path
    file = path if path.is_file() and arguments.retriever_name != "bm25" else None
    folder = path.with_name(f"{path.name}.documents") if file is not None else path
    return folder, IndexOptions(arguments.retriever_model, arguments.faiss, file)
