"""`python -m retriever.serve`: the retriever of a node. It accepts connections once its index is loaded.

Option names are the ones that retrieval servers of Search-R1 take, so that a launch script keeps working.
"""

import argparse
import sys
from pathlib import Path

from protocol.errors import OperatorError
from protocol.http.bearer import read_token
from protocol.http.listen import bind
from protocol.http.service import serve_app
from retriever.index_arguments import add_index_arguments, index_options
from retriever.index_folder import content_hash, open_or_build
from retriever.indexes.by_name import INDEXES
from retriever.service import Limits, RetrieverService

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def main() -> int:
    arguments = _parser().parse_args()
    try:
        _serve(arguments)
    except OperatorError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def _serve(arguments: argparse.Namespace) -> None:
    name = arguments.retriever_name
    if name not in INDEXES:
        raise OperatorError(f"retriever: --retriever-name {name} is not known. Choose one of: {', '.join(INDEXES)}.")
    token = _token(arguments)
    # Bound before the index is read: a taken port is told at once, not after minutes of building.
    listener = bind("retriever", arguments.host, arguments.port)
    others = [bind("retriever", host, listener.getsockname()[1]) for host in arguments.also_on]
    folder, options = index_options(arguments)
    index, corpus, was_built = open_or_build(folder, arguments.corpus_path, name, options)
    digest = content_hash(folder, arguments.reranker or None, arguments.rerank_depth)
    if arguments.reranker:
        from retriever.indexes.reranked import RerankedIndex  # torch, which bm25 alone does not need

        index = RerankedIndex(index, corpus, arguments.reranker, arguments.rerank_depth)
    limits = Limits(arguments.topk, arguments.num_threads, arguments.max_waiting, cache_size=arguments.cache_size)
    service = RetrieverService(index, corpus, arguments.index_path.name, limits, name, digest)
    introduction = f"retriever: {len(corpus)} documents, index {'built' if was_built else 'loaded'}"
    serve_app(service.app(), listener, token, introduction, others, service.turn_away)


def _token(arguments: argparse.Namespace) -> str | None:
    """Return the token to ask for; None when every program of this machine may search.

    Raises: OperatorError for a service that strangers on other machines could use.
    """
    if arguments.token_file is not None and not arguments.open:
        return read_token(arguments.token_file)
    for option, host in [("--host", arguments.host), *(("--also-on", host) for host in arguments.also_on)]:
        if host not in _LOOPBACK:
            raise OperatorError(
                f"retriever: on {option} {host} programs of other machines can search too, so it asks for a token. "
                "Give --token-file without --open, or listen on 127.0.0.1."
            )
    return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m retriever.serve", description=__doc__)
    add_index_arguments(parser)
    parser.add_argument("--topk", type=_positive, default=3, help="passages when a request names no topk")
    parser.add_argument("--reranker", help="cross-encoder that orders what was found: folder, or name on the hub")
    parser.add_argument("--rerank-depth", type=_positive, default=30, help="documents that the reranker reads")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--also-on", action="append", default=[], metavar="HOST", help="listen on this address too")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on; 0: a free one")
    parser.add_argument("--token-file", type=Path, help="ask for the bearer token in this file (not on /health)")
    parser.add_argument("--open", action="store_true", help="ask for no token: on this machine's own address alone")
    parser.add_argument("--num-threads", type=_positive, default=1, help="threads that search")
    parser.add_argument("--max-waiting", type=_positive, default=512, help="requests in flight before 503")
    parser.add_argument("--cache-size", type=int, default=10_000, help="queries whose hits are kept; 0: none")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
