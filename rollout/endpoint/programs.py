"""Users' agent programs, one call per sample. A function that blocks delays only itself, a coroutine all the others."""

import asyncio
import inspect
import math
import os
import re
import threading
from concurrent.futures import Future
from typing import Any

from protocol.contained_tasks import contain_tasks, is_own_cancellation
from protocol.errors import NeighbourError
from protocol.one_line import describe_error, one_line, place_of
from rollout.environments.agents import AgentProgram, AgentTask
from rollout.episodes.conversation import AGENT

_END_S = 5.0
_KEY = re.compile(r"sluice-[\w-]{32}")  # a sample's key


class AgentPrograms:
    """Runs one program for many samples: coroutines in one event loop, other functions in a thread each."""

    def __init__(self, program: AgentProgram) -> None:
        self._program = program
        self._environment = {*os.environ.items()}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="agents-programs", daemon=True)
        self._thread.start()

    def start(self, task: AgentTask) -> "Future[float | None]":
        """Return the future of the program's reward. Its exception is NeighbourError("agent").

        Cancelling the future cancels a coroutine. A function in a thread continues: its requests are refused.
        """
        return asyncio.run_coroutine_threadsafe(self._outcome(task), self._loop)

    async def close(self) -> None:
        """Stop the event loop; called in another one. Threads that still run end with the process."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join, _END_S)

    async def _outcome(self, task: AgentTask) -> float | None:
        """Return the program's reward. Raises: NeighbourError; CancelledError only when this task is cancelled."""
        contain_tasks()
        try:
            is_async = inspect.iscoroutinefunction(self._program)
            returned = await (self._program(task) if is_async else self._in_thread(task))
            self._check_environment()
            return _reward(returned)
        except NeighbourError:
            raise
        except BaseException as error:  # a user's code may raise anything
            # A CancelledError of the program's own would cancel the future, and the sample would wait for its deadline.
            if is_own_cancellation(error):
                raise
            raise _failure(error) from error

    def _check_environment(self) -> None:
        """Raise NeighbourError if a program put its sample's key into an environment variable of all samples here."""
        for name, value in {*os.environ.items()} - self._environment:
            if _KEY.fullmatch(value) and value not in name:
                problem = f"a program set the environment variable {name}, which all samples read, to its sample's key"
                raise NeighbourError(AGENT, f"{problem}. Give api_key and base_url to each client")

    async def _in_thread(self, task: AgentTask) -> Any:
        """Return a function's result. A thread that never ends does not keep the process alive."""
        result: Future[Any] = Future()

        def run() -> None:
            if not result.set_running_or_notify_cancel():  # cannot be cancelled afterwards
                return
            try:
                result.set_result(self._program(task))
            except BaseException as error:  # a user's code may raise anything
                failure = _failure(error)
                failure.__cause__ = error
                result.set_exception(failure)

        threading.Thread(target=run, name="agent", daemon=True).start()
        return await asyncio.wrap_future(result)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            self._loop.run_until_complete(asyncio.sleep(0))
        finally:
            asyncio.set_event_loop(None)
            self._loop.close()


def _failure(error: BaseException) -> NeighbourError:
    """Return a program's exception as NeighbourError("agent"), with the user's line."""
    return NeighbourError(AGENT, describe_error(error), place_of(error))


def _reward(returned: Any) -> float | None:
    """Return a program's result as a reward: a number, or an array or tensor of one; None stays None."""
    if returned is None:
        return None
    plain = returned.item() if hasattr(returned, "item") else returned
    if not isinstance(plain, int | float) or not math.isfinite(plain):
        raise NeighbourError(AGENT, f"the program returned {one_line(repr(returned), 80)}, expected a number or None")
    return float(plain)
