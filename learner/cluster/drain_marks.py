"""Which nodes are drained, and what the run says of them, without ever waiting for Ray's head.

A head that stands still answers after half a minute at best: whoever asks it in the loop that shows the run hears no
Ctrl-C for as long.
"""

import contextlib
import threading
from collections.abc import Callable, Mapping

from protocol.node.drained import Leaving, drained_nodes, say_leaving

# A head that is well answers within a few milliseconds.
_ANSWER_S = 0.2


class DrainMarks:
    """What the head was last heard to say. Each call blocks for 0.2 s at most."""

    def __init__(self) -> None:
        self._nodes: frozenset[str] = frozenset()
        self._asking: threading.Thread | None = None
        self._telling: threading.Thread | None = None

    def nodes(self) -> frozenset[str]:
        """Return Ray's names of the drained nodes as the head has them, or had them when it last answered."""
        self._asking = _going_on(self._asking, self._ask)
        return self._nodes

    def tell(self, words: Mapping[str, Leaving]) -> None:
        """Tell operators how the run leaves nodes. While the head does not answer nothing is told: call it again."""

        def say() -> None:
            for node, word in words.items():
                say_leaving(node, word)

        self._telling = _going_on(self._telling, say)

    def _ask(self) -> None:
        self._nodes = drained_nodes()


def _going_on(thread: threading.Thread | None, target: Callable[[], None]) -> threading.Thread:
    """Return the thread that still waits for the head, or a new one that asks it."""

    def ask() -> None:
        with contextlib.suppress(Exception):  # of Ray's, of several kinds: the head did not answer, and is asked again
            target()

    if thread is None or not thread.is_alive():
        thread = threading.Thread(target=ask, name="drain-marks", daemon=True)
        thread.start()
    thread.join(_ANSWER_S)
    return thread
