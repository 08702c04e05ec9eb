"""A file of another node, read through that node's keeper: an actor that every node of a cluster has.

Imports Ray only when a file is read: whoever does so is one of Ray's processes.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from protocol.errors import NeighbourError, OperatorError
from protocol.node.model_copy import ReadFile
from protocol.ray_calls import NAMESPACE, keeper_of, naming_ray_errors

_PIECE_BYTES = 8 << 20
# So many pieces are under way at once: the next one is read while this one travels.
_NUM_AHEAD = 3
# Longest time without a piece: a link that is cut for a while, a keeper that Ray starts again.
_SILENCE_S = 120.0
_PIECE_S = 30.0
_AGAIN_S = 1.0


def reader_of(node_id: str) -> ReadFile:
    """Return what reads files of the node that Ray calls so.

    Its reading raises: NeighbourError when nothing comes, OperatorError when the node says why it cannot be read.
    """

    def ask(path: str, offset: int, size: int) -> Any:
        import ray

        keeper = ray.get_actor(keeper_of(node_id), namespace=NAMESPACE)
        if not hasattr(keeper, "read_file"):
            raise OperatorError(
                "The keeper of the node that has the model runs older code. Run deploy/start_cluster.sh again there."
            )
        return keeper.read_file.remote(path, offset, size)

    def take(reference: Any) -> bytes:
        import ray

        with naming_ray_errors("the keeper of the node that has the model", _PIECE_S):
            return bytes(ray.get(reference, timeout=_PIECE_S))

    return lambda path, size: pieces(path, size, ask, take)


def pieces(
    path: str,
    size: int,
    ask: Callable[[str, int, int], Any],
    take: Callable[[Any], bytes],
    silence_s: float = _SILENCE_S,
) -> Iterator[bytes]:
    """Yield a file in pieces, in order. One that does not come is asked for again, for silence_s.

    ask: begins to read at an offset; take: waits for what was asked for.
    """
    starts = deque(range(0, size, _PIECE_BYTES))
    coming: deque[tuple[int, Any]] = deque()
    heard_at = time.monotonic()
    while starts or coming:
        try:
            while starts and len(coming) < _NUM_AHEAD:
                coming.append((starts[0], ask(path, starts[0], _PIECE_BYTES)))
                starts.popleft()
            piece = take(coming[0][1])
        except (NeighbourError, ValueError) as error:  # ValueError: Ray knows of no such keeper
            if time.monotonic() - heard_at > silence_s:
                raise NeighbourError("model", f"{path} cannot be read on the node that has it: {error}") from error
            starts.extendleft(start for start, _ in reversed(coming))
            coming.clear()
            time.sleep(_AGAIN_S)
            continue
        coming.popleft()
        heard_at = time.monotonic()
        yield piece
