"""`python -m retriever.build`: make the index of a corpus ahead of the service's start."""

import argparse
import sys
import time
from pathlib import Path

from protocol.errors import OperatorError
from retriever.corpus import read_corpus
from retriever.index_folder import build_index


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m retriever.build", description=__doc__)
    parser.add_argument("--corpus-path", "--corpus_path", type=Path, required=True, help='JSONL of {"id", "contents"}')
    parser.add_argument("--index-path", "--index_path", type=Path, required=True, help="folder of the index")
    arguments = parser.parse_args()
    started = time.monotonic()
    try:
        corpus = read_corpus(arguments.corpus_path)
        build_index(arguments.index_path, corpus)
    except OperatorError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(f"{arguments.index_path}: {len(corpus)} documents indexed in {time.monotonic() - started:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
