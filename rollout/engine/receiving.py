"""Receiving a push in the background. This file does not import vLLM."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
_POLL_EVERY_S = 0.01
_CHECK_ALIVE_EVERY_S = 0.05


def in_thread(name: str, call: Callable[[], T]) -> Future[T]:
    """Return the call's future result. The thread is a daemon: an executor's thread would block the process's exit."""
    made: Future[T] = Future()
    made.set_running_or_notify_cancel()  # the call completes even if its caller stops waiting

    def run() -> None:
        try:
            made.set_result(call())
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return made


async def until_received(has_received: Callable[[], Awaitable[bool]], is_alive: Callable[[], bool]) -> None:
    """Poll `has_received` until it is true.

    Raises: the error that stopped the push; ConnectionError once the engine is dead, because vLLM never completes
    pending calls of a dead engine.
    """
    while not await _answer(has_received(), is_alive):
        await asyncio.sleep(_POLL_EVERY_S)


async def _answer(call: Awaitable[bool], is_alive: Callable[[], bool]) -> bool:
    asked = asyncio.ensure_future(call)
    try:
        while not (await asyncio.wait({asked}, timeout=_CHECK_ALIVE_EVERY_S))[0]:
            if not is_alive():
                raise ConnectionError("the engine died before it had the last bucket")
        return asked.result()
    finally:
        asked.cancel()
