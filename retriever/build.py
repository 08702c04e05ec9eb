"""`sluice build-index`: build the index of a corpus before the service starts."""

import argparse
import sys
import time
from collections.abc import Sequence

from protocol.errors import OperatorError
from retriever.index_folder import build_index, content_hash
from retriever.indexes.by_name import add_index_arguments, index_options, kind_named


def main(given: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="sluice build-index", description=__doc__)
    add_index_arguments(parser)
    arguments = parser.parse_args(given)
    started = time.monotonic()
    try:
        folder, options = index_options(arguments)
        kind = kind_named(arguments.retriever_name, options)
        _, corpus = build_index(folder, arguments.corpus_path, arguments.retriever_name, kind)
        digest = content_hash(folder)
    except OperatorError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(f"{folder}: {len(corpus)} documents indexed in {time.monotonic() - started:.1f} s, content hash {digest}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
