"""Processes that answer requests one at a time, as lines of JSON through stdin and stdout.

A process that dies is replaced. So a call may crash, exceed a limit or never end, and the service stays up.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Abandoned calls usually end soon. After this time their process is killed.
_ABANDONED_S = 60.0
# A user's folder may hold a rewards.py: the working folder is not searched for our modules.
_PATHS = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]


class ProcessDied(Exception):
    """The process ended during a call."""


class StartFailed(ProcessDied):
    """The process ended before it was ready: what it needs is missing, whatever the call holds."""


class Process:
    """One process of `python -m MODULE ARGUMENTS`. It writes a line when it is ready, then one per request."""

    def __init__(self, arguments: Sequence[str]) -> None:
        """Blocks until the process is ready. Raises: StartFailed."""
        self._process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-P", "-m", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(_PATHS)},
            start_new_session=True,  # Ctrl-C ends the service, which ends these
        )
        self._end = weakref.finalize(self, _end, self._process)  # also at the exit of the service
        try:
            self.greeting = self._receive()
        except ProcessDied as error:
            raise StartFailed(str(error)) from None

    def call(self, request: Any) -> Any:
        """Return the reply; blocks. Raises: ProcessDied."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        return self._receive()

    def kill(self) -> None:
        self._process.kill()

    def _receive(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            self._end()
            raise ProcessDied(f"its process ended with status {self._process.returncode}")
        return json.loads(line)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):
            pipe.close()


class ProcessPool:
    """Processes for one event loop. Queued calls of cancelled callers are skipped."""

    def __init__(self, arguments: Sequence[str], number: int, first: Process | None = None) -> None:
        """arguments: module and its arguments. first: a process that runs already."""
        self._arguments = arguments
        self._idle: asyncio.LifoQueue[Process | None] = asyncio.LifoQueue()
        for process in (*[None] * (number - 1), first):
            self._idle.put_nowait(process)

    async def call(self, request: Any) -> Any:
        """Return the reply of a free process. Raises: ProcessDied."""
        loop = asyncio.get_running_loop()
        call = _Call(await self._idle.get(), loop.create_future())

        def run() -> None:
            reply, problem = None, None
            try:
                call.process = call.process or Process(self._arguments)
                reply = call.process.call(request)
            except Exception as error:
                call.process, problem = None, error
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._finish, call, reply, problem)

        # A daemon: a call that never returns does not keep the service from exiting.
        threading.Thread(target=run, daemon=True).start()
        try:
            return await call.reply
        except asyncio.CancelledError:
            loop.call_later(_ABANDONED_S, call.kill)
            raise

    def _finish(self, call: "_Call", reply: Any, error: Exception | None) -> None:
        self._idle.put_nowait(call.process)
        call.process = None
        if call.reply.done():
            return
        if error is not None:
            call.reply.set_exception(error)
        else:
            call.reply.set_result(reply)


@dataclass(eq=False)
class _Call:
    """A call and its process; None: not started, or free again."""

    process: Process | None
    reply: "asyncio.Future[Any]"

    def kill(self) -> None:
        """Kill the process if it still runs the call."""
        if self.process is not None:
            self.process.kill()
