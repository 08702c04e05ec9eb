"""The drained nodes, and the run's reports about them, without waiting for Ray's head.

A head that hangs answers after half a minute at best. The loop that shows the run must not wait for it: it would not
see a Ctrl-C for as long.
"""

import contextlib
import threading
from collections.abc import Mapping

from protocol.node.ray_nodes import DrainReport, drained_nodes, write_drain_report

# A healthy head answers within a few milliseconds.
_ANSWER_S = 0.2


class DrainMarks:
    """The newest answer of Ray's head."""

    def __init__(self) -> None:
        self._nodes: frozenset[str] = frozenset()
        self._thread: threading.Thread | None = None

    def exchange(self, reports: Mapping[str, DrainReport]) -> frozenset[str]:
        """Return Ray's names of the drained nodes, as last read, and write the run's reports by node.

        Blocks for 0.2 s at most. Call it again: while the head does not answer, nothing is read or written.
        """
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._ask, args=(dict(reports),), name="drain-marks", daemon=True)
            self._thread.start()
        self._thread.join(_ANSWER_S)
        return self._nodes

    def _ask(self, reports: Mapping[str, DrainReport]) -> None:
        with contextlib.suppress(Exception):  # Ray raises several kinds: the head did not answer
            self._nodes = drained_nodes()
            for node, report in reports.items():
                write_drain_report(node, report)
