"""Tasks of a user's code that cannot end the event loop.

asyncio raises a task's SystemExit and KeyboardInterrupt out of the loop, which ends every other task. A user's code may
run a policy's program that calls exit().
"""

import asyncio
from collections.abc import Coroutine, Generator
from contextvars import ContextVar
from typing import Any, TypeVar

_T = TypeVar("_T")
_is_user_code: ContextVar[bool] = ContextVar("is_user_code", default=False)


def contain_tasks() -> None:
    """Turn SystemExit and KeyboardInterrupt into RuntimeError in all tasks that the running task starts from now on."""
    _is_user_code.set(True)
    loop = asyncio.get_running_loop()
    if loop.get_task_factory() is None:
        loop.set_task_factory(_make_task)


def is_own_cancellation(error: BaseException) -> bool:
    """Return whether an exception is the cancellation of the running task, and not one raised inside it."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def _make_task(
    loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, _T] | Generator[Any, None, _T], **options: Any
) -> "asyncio.Task[_T]":
    if _is_user_code.get() and isinstance(coroutine, Coroutine):
        coroutine = _ContainedCoroutine(coroutine)
    return asyncio.Task(coroutine, loop=loop, **options)


class _ContainedCoroutine(Coroutine[Any, Any, _T]):
    """A coroutine that raises RuntimeError instead of SystemExit and KeyboardInterrupt.

    It is a class because a wrapper function that is cancelled before its first step would never close the coroutine.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, _T]) -> None:
        self._coroutine = coroutine

    def send(self, value: Any) -> Any:
        try:
            return self._coroutine.send(value)
        except (SystemExit, KeyboardInterrupt) as error:
            raise _runtime_error(error) from error

    def throw(self, *error: Any) -> Any:
        try:
            return self._coroutine.throw(*error)
        except (SystemExit, KeyboardInterrupt) as raised:
            raise _runtime_error(raised) from raised

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, _T]:
        return self._coroutine.__await__()


def _runtime_error(error: BaseException) -> RuntimeError:
    return RuntimeError(f"a task raised {type(error).__name__}: {error}")
