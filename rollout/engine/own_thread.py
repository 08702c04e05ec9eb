"""A call in a thread of its own, which nobody waits for when the process ends."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_thread(name: str, call: Callable[[], T]) -> Future[T]:
    """Return what the call will come to. An executor's thread would hold up the process that ends."""
    made: Future[T] = Future()
    made.set_running_or_notify_cancel()  # from now on it comes to an end, whether or not somebody still asks

    def run() -> None:
        try:
            made.set_result(call())
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return made
