"""`python -m retriever.serve`: the retriever of a node. It accepts connections once its index is loaded.

Option names are those of Search-R1's retrieval servers.
"""

import argparse
import sys
from collections.abc import Sequence

from protocol.errors import OperatorError
from protocol.http.bearer import read_token
from protocol.http.listen import LOOPBACK, add_listen_options, bind, positive
from protocol.http.service import run_service, serve_app
from retriever.index_folder import content_hash, open_or_build
from retriever.indexes.by_name import add_index_arguments, index_options
from retriever.service import Limits, RetrieverService


def main(arguments: Sequence[str]) -> int:
    return run_service(_parser(), arguments, _serve)


def _serve(arguments: argparse.Namespace) -> None:
    name, token = arguments.retriever_name, _token(arguments)
    # Bound before the index is read: a taken port is reported at once, not after minutes of building.
    listener = bind("retriever", arguments.host, arguments.port)
    others = [bind("retriever", host, listener.getsockname()[1]) for host in arguments.also_on]
    folder, options = index_options(arguments)
    index, corpus, was_built = open_or_build(folder, arguments.corpus_path, name, options)
    digest = content_hash(folder)
    limits = Limits(arguments.topk, arguments.num_threads, arguments.max_waiting, cache_size=arguments.cache_size)
    service = RetrieverService(index, corpus, arguments.index_path.name, limits, name, digest)
    access = "no token is required (as Search-R1's client expects)" if token is None else "a token is required"
    introduction = f"retriever: {len(corpus)} documents, index {'built' if was_built else 'loaded'}, {access}"
    serve_app(service.app(), listener, token, introduction, others)


def _token(arguments: argparse.Namespace) -> str | None:
    """Return the required token; None when every program of this machine may search.

    Raises: OperatorError when other machines could search without a token.
    """
    if arguments.token_file is not None and not arguments.open:
        return read_token(arguments.token_file)
    for option, host in [("--host", arguments.host), *(("--also-on", host) for host in arguments.also_on)]:
        if host not in LOOPBACK:
            raise OperatorError(
                f"retriever: on {option} {host} other machines can search too, so a token is required. "
                "Give --token-file without --open, or listen on 127.0.0.1."
            )
    return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m retriever.serve", description=__doc__)
    add_index_arguments(parser)
    parser.add_argument("--topk", type=positive, default=3, help="passages when a request names no topk")
    parser.add_argument("--also-on", action="append", default=[], metavar="HOST", help="another address to listen on")
    add_listen_options(parser, 8000)
    parser.add_argument("--open", action="store_true", help="require no token; allowed on loopback addresses only")
    parser.add_argument("--num-threads", type=positive, default=1, help="threads that search")
    parser.add_argument("--max-waiting", type=positive, default=512, help="requests in flight before 503")
    parser.add_argument("--cache-size", type=int, default=10_000, help="number of queries in the cache; 0: no cache")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
