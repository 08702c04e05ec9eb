"""Waiting for a push's last bucket: no vLLM here."""

import asyncio
from collections.abc import Awaitable, Callable
from time import perf_counter

_LOOK_AFTER = 0.05  # of the time that a push has taken so far, whether its last bucket has come
_LOOK_EVERY_S = (0.002, 0.05)
_ALIVE_EVERY_S = 0.05


async def until_received(has_received: Callable[[], Awaitable[bool]], is_alive: Callable[[], bool]) -> None:
    """Return when the engine says that it has the last bucket; asked again where it says that it has not.

    Raises: what ended the receiving; ConnectionError once the engine is dead, which vLLM leaves calls under way to wait
    for, for ever.
    """
    begun, (least_s, most_s) = perf_counter(), _LOOK_EVERY_S
    while not await _answer(has_received(), is_alive):
        await asyncio.sleep(min(most_s, max(least_s, _LOOK_AFTER * (perf_counter() - begun))))


async def _answer(call: Awaitable[bool], is_alive: Callable[[], bool]) -> bool:
    asked = asyncio.ensure_future(call)
    try:
        while not (await asyncio.wait({asked}, timeout=_ALIVE_EVERY_S))[0]:
            if not is_alive():
                raise ConnectionError("the engine died before it had the last bucket")
        return asked.result()
    finally:
        asked.cancel()
