"""Holds generations back while the engine's weights change, and until the learner has found them right.

Requests inside the engine are frozen by the engine itself and go on after the push. A conversation that reaches its
next turn in those milliseconds must wait here: the engine refuses requests while its weights are not verified, and one
that was queued under the old version would be served from the old version's prefix cache. A generation that ends with
tokens of a version that nobody has verified yet waits too; it fails when the version turns out to be wrong.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class VersionGate:
    """Starts closed: nothing is generated before the first verified push. Lives in one event loop.

    num_disowned: how often what was being written was given up.
    """

    def __init__(self) -> None:
        self.num_disowned = 0
        self._opened = asyncio.Event()
        self._version: int | None = None  # that was verified last
        self._coming: int | None = None  # that is being loaded, or was loaded and not verified
        self._writing: set[asyncio.Timeout] = set()
        self._stopped: dict[asyncio.Timeout, float] | None = None  # seconds left of each, while the engine sleeps

    @property
    def version(self) -> int | None:
        """The version that was verified last for the run that is served; None before the first."""
        return self._version

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    def open(self, version: int | None = None) -> None:
        """Let turns begin and end. version: that of the weights, which were verified."""
        self._version, self._coming = version, None
        self._opened.set()

    def close(self, coming: int | None = None) -> None:
        """Hold turns back. coming: the version that is loaded now; one of its number may have been verified before."""
        self._coming = coming
        self._opened.clear()

    def stop_time(self) -> None:
        """Hold turns back while the engine sleeps; it counts against no turn that is being written."""
        self._opened.clear()
        if self._stopped is None:
            self._stopped = {}
            for deadline in self._writing:
                self._stop(deadline)

    def start_time(self) -> None:
        """Have deadlines pass again, with as much left as before; turns are held back until `open`."""
        stopped, self._stopped = self._stopped or {}, None
        for deadline, left_s in stopped.items():
            if deadline in self._writing and not deadline.expired() and deadline.when() is None:
                deadline.reschedule(asyncio.get_running_loop().time() + left_s)

    def forget(self) -> None:
        """Close for a run that numbers its versions anew."""
        self.close()
        self._version = None

    def disown(self) -> None:
        """Give up all that is being written: the weights that write it were never verified."""
        self.num_disowned += 1
        for deadline in self._writing:
            if not deadline.expired():
                deadline.reschedule(asyncio.get_running_loop().time())

    @contextmanager
    def writing(self, deadline: asyncio.Timeout) -> Iterator[None]:
        """Have the deadline, which was entered, pass at once when what is written inside is given up."""
        self._writing.add(deadline)
        self._stop(deadline)
        try:
            yield
        finally:
            self._writing.discard(deadline)

    def _stop(self, deadline: asyncio.Timeout) -> None:
        if self._stopped is not None and not deadline.expired() and (when := deadline.when()) is not None:
            self._stopped[deadline] = when - asyncio.get_running_loop().time()
            deadline.reschedule(None)

    async def verified(self, version: int) -> None:
        """Return once tokens of this version may be used, inside `writing`."""
        if version != self._version or version == self._coming:
            await self.passed()

    async def passed(self) -> None:
        """Return while the gate is open; the caller must ask the engine before it waits for anything else."""
        while not self._opened.is_set():
            await self._opened.wait()
