"""Holds turns back while the engine's weights change, and until the learner has verified them.

A conversation that reaches its next turn during a push waits here: the engine refuses requests while its weights are
unverified, and a queued request would use the old version's prefix cache. A turn that ends with tokens of an unverified
version also waits; it fails when the version is found to be wrong.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class VersionGate:
    """Starts closed: nothing is generated before the first verified push. Lives in one event loop.

    num_invalidated: how often the turns under way were failed.
    """

    def __init__(self) -> None:
        self.num_invalidated = 0
        self._opened = asyncio.Event()
        self._version: int | None = None  # latest verified version
        self._coming: int | None = None  # version that is being loaded, or is loaded and not verified
        self._writing: set[asyncio.Timeout] = set()  # deadlines of the turns under way
        self._stopped: dict[asyncio.Timeout, float] | None = None  # deadline -> seconds left, while the engine sleeps

    @property
    def version(self) -> int | None:
        """The latest verified version of the attached run."""
        return self._version

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    def open(self, version: int | None = None) -> None:
        """Let turns begin and end. version: the verified version."""
        self._version, self._coming = version, None
        self._opened.set()

    def close(self, coming: int | None = None) -> None:
        """Hold turns back. coming: the version that is loaded now."""
        self._coming = coming
        self._opened.clear()

    def stop_time(self) -> None:
        """Hold turns back while the engine sleeps, and stop the deadlines of the turns under way."""
        self._opened.clear()
        if self._stopped is None:
            self._stopped = {}
            for deadline in self._writing:
                self._stop(deadline)

    def start_time(self) -> None:
        """Resume the deadlines. Turns are held back until `open`."""
        stopped, self._stopped = self._stopped or {}, None
        for deadline, left_s in stopped.items():
            if deadline in self._writing and not deadline.expired() and deadline.when() is None:
                deadline.reschedule(asyncio.get_running_loop().time() + left_s)

    def forget(self) -> None:
        """Close for a run that numbers its versions from 0 again."""
        self.close()
        self._version = None

    def invalidate_unverified(self) -> None:
        """Fail the turns under way: their weights were never verified."""
        self.num_invalidated += 1
        for deadline in self._writing:
            if not deadline.expired():
                deadline.reschedule(asyncio.get_running_loop().time())

    @contextmanager
    def writing(self, deadline: asyncio.Timeout) -> Iterator[None]:
        """Register a turn's entered deadline, so that the gate can stop it or end it early."""
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

    async def wait_verified(self, version: int) -> None:
        """Return once tokens of this version may be used, inside `writing`."""
        if version != self._version or version == self._coming:
            await self.wait_open()

    async def wait_open(self) -> None:
        """Return while the gate is open. The caller must call the engine before it awaits anything else."""
        while not self._opened.is_set():
            await self._opened.wait()
