"""Holds new generations back while the engine's weights change.

Requests inside the engine are frozen by the engine itself and go on after the push. A conversation that reaches its
next turn in those milliseconds must wait here: the engine refuses requests while its weights are not verified, and one
that was queued under the old version would be served from the old version's prefix cache.
"""

import asyncio


class VersionGate:
    """Starts closed: nothing is generated before the first verified push. Lives in one event loop."""

    def __init__(self) -> None:
        self._opened = asyncio.Event()

    def open(self) -> None:
        self._opened.set()

    def close(self) -> None:
        self._opened.clear()

    async def passed(self) -> None:
        """Return while the gate is open; the caller must ask the engine before it waits for anything else."""
        while not self._opened.is_set():
            await self._opened.wait()
