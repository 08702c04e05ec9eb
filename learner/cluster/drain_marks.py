"""The drained nodes, and the run's reports about them, without ever waiting for Ray's head.

A head that hangs answers after half a minute at best. The loop that shows the run must not wait for it: it would not
see a Ctrl-C for as long.
"""

import contextlib
import threading
from collections.abc import Callable, Mapping

from protocol.node.drained import DrainReport, drained_nodes, write_drain_report

# A healthy head answers within a few milliseconds.
_ANSWER_S = 0.2


class DrainMarks:
    """The newest answers of Ray's head. Each call blocks for 0.2 s at most."""

    def __init__(self) -> None:
        self._nodes: frozenset[str] = frozenset()
        self._reader: threading.Thread | None = None
        self._writer: threading.Thread | None = None

    def nodes(self) -> frozenset[str]:
        """Return Ray's names of the drained nodes as of the head's newest answer."""
        self._reader = _start_unless_running(self._reader, self._read)
        return self._nodes

    def write(self, reports: Mapping[str, DrainReport]) -> None:
        """Write the run's reports, by node. Call it again: while the head does not answer nothing is written."""

        def write() -> None:
            for node, report in reports.items():
                write_drain_report(node, report)

        self._writer = _start_unless_running(self._writer, write)

    def _read(self) -> None:
        self._nodes = drained_nodes()


def _start_unless_running(thread: threading.Thread | None, target: Callable[[], None]) -> threading.Thread:
    """Return the thread that still waits for the head, or a new one."""

    def run() -> None:
        with contextlib.suppress(Exception):  # Ray raises several kinds: the head did not answer, and is asked again
            target()

    if thread is None or not thread.is_alive():
        thread = threading.Thread(target=run, name="drain-marks", daemon=True)
        thread.start()
    thread.join(_ANSWER_S)
    return thread
