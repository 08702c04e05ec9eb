"""Tasks that a user's code starts cannot end the event loop that they run in.

asyncio lets SystemExit and KeyboardInterrupt out of any task, and the loop ends with all that it runs. Code that a
policy wrote and a user's code runs may well call exit().
"""

import asyncio
from collections.abc import Coroutine, Generator
from contextvars import ContextVar
from typing import Any, TypeVar

_T = TypeVar("_T")
_is_user_code: ContextVar[bool] = ContextVar("is_user_code", default=False)


def contain_tasks() -> None:
    """From here on the running task is a user's: in the tasks that it starts, and those that they start, what would end
    the event loop is a RuntimeError.
    """
    _is_user_code.set(True)
    loop = asyncio.get_running_loop()
    if loop.get_task_factory() is None:
        loop.set_task_factory(_make_task)


def _make_task(
    loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, _T] | Generator[Any, None, _T], **options: Any
) -> "asyncio.Task[_T]":
    if _is_user_code.get() and isinstance(coroutine, Coroutine):
        coroutine = _Contained(coroutine)
    return asyncio.Task(coroutine, loop=loop, **options)


class _Contained(Coroutine[Any, Any, _T]):
    """A coroutine in which what would end the event loop is a RuntimeError. Not a function: cancelled before its first
    step, one would leave the coroutine inside it without ever closing it.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, _T]) -> None:
        self._coroutine = coroutine

    def send(self, value: Any) -> Any:
        try:
            return self._coroutine.send(value)
        except (SystemExit, KeyboardInterrupt) as error:
            raise _as_failure(error) from error

    def throw(self, *error: Any) -> Any:
        try:
            return self._coroutine.throw(*error)
        except (SystemExit, KeyboardInterrupt) as raised:
            raise _as_failure(raised) from raised

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, _T]:
        return self._coroutine.__await__()


def _as_failure(error: BaseException) -> RuntimeError:
    return RuntimeError(f"a task raised {type(error).__name__}: {error}")
