"""Whether servers can be reached: each is pinged while something is awaited of it.

A call to a server whose link is cut or whose process stands still does not fail, it hangs, and the limit of a push's
states is for slow work, not for silence.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from protocol.weights.controls import ServerControls

SILENCE_S = 8.0
_PARTS = 8

T = TypeVar("T")


class SilentServersError(Exception):
    """Servers that answered nothing for the limit's time. names: theirs."""

    def __init__(self, names: Sequence[str], silence_s: float) -> None:
        super().__init__(f"{', '.join(names)} answered no ping for {silence_s:g} s")
        self.names = tuple(names)


async def while_present(servers: Sequence[ServerControls], silence_s: float, work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` returns, if all these servers answer pings meanwhile; what they fail by is the work's to tell.

    Raises: SilentServersError within silence_s * 9 / 8 of a server's last answer; the work is cancelled then.
    """
    task = asyncio.ensure_future(work)
    watches = {asyncio.ensure_future(_silence(server, silence_s)): server.name for server in servers}
    try:
        await asyncio.wait({task, *watches}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise SilentServersError([name for watch, name in watches.items() if watch.done()], silence_s)
    finally:
        for each in (task, *watches):
            each.cancel()
        await asyncio.gather(task, *watches, return_exceptions=True)


async def _silence(server: ServerControls, silence_s: float) -> None:
    """Return when one ping was not answered for silence_s."""
    while True:
        ping = asyncio.ensure_future(server.ping())
        try:
            # In parts: time in which this process itself stood still counts as one of them.
            for _ in range(_PARTS):
                await asyncio.wait({ping}, timeout=silence_s / _PARTS)
                if ping.done():
                    break
            else:
                return
        finally:
            ping.cancel()
        # One that fails is let pass: a server that is gone fails every call, and those say how.
        if not ping.cancelled():
            ping.exception()
        await asyncio.sleep(silence_s / _PARTS)
