"""`python -m retriever.build`: make the index of a corpus ahead of the service's start."""

import argparse
import sys
import time
from pathlib import Path

from protocol.errors import OperatorError
from retriever.index_folder import build_index
from retriever.indexes.by_name import INDEXES


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m retriever.build", description=__doc__)
    parser.add_argument("--corpus-path", "--corpus_path", type=Path, required=True, help='JSONL of {"id", "contents"}')
    parser.add_argument("--index-path", "--index_path", type=Path, required=True, help="folder of the index")
    parser.add_argument("--retriever-name", "--retriever_name", choices=list(INDEXES), default="bm25")
    arguments = parser.parse_args()
    started = time.monotonic()
    try:
        _, corpus = build_index(arguments.index_path, arguments.corpus_path, arguments.retriever_name)
    except OperatorError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(f"{arguments.index_path}: {len(corpus)} documents indexed in {time.monotonic() - started:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
