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
    """Return what `work` returns, if all these servers answer pings meanwhile.

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
    """Return when no ping was answered for silence_s.

    One that fails was not answered either: a server that is gone fails the work too, and sooner; where only the way to
    it is cut, a new connection fails and what was asked over an old one hangs.
    """
    num_silent = 0  # parts in a row: time in which this process itself stood still counts as one of them
    while num_silent < _PARTS:
        ping = asyncio.ensure_future(server.ping())
        try:
            while not ping.done() and num_silent < _PARTS:
                await asyncio.wait({ping}, timeout=silence_s / _PARTS)
                num_silent += not ping.done()
        finally:
            ping.cancel()
        if ping.done():
            is_answered = not ping.cancelled() and ping.exception() is None
            num_silent = 0 if is_answered else num_silent + 1
            await asyncio.sleep(silence_s / _PARTS)
