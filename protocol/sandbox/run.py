"""Runs programs in the sandbox: so many at a time, each a process of its own that is gone when its run has ended."""

import asyncio
import contextlib
import itertools
import json
import math
import os
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from typing import Literal

from protocol.errors import OperatorError
from protocol.one_line import one_line
from protocol.sandbox.limits import Limits, Ran
from protocol.sandbox.system_calls import refusing_filter

_INSIDE = Path(__file__).with_name("inside.py")
_SHOWN = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/dev/null", "/dev/zero", "/dev/urandom")
# User ids that no system gives out; the kernel counts processes by them.
_FIRST_UID, _NUM_UIDS = 1_900_000_000, 100_000
_EMPTY_S = 10.0
_uids = itertools.count(os.getpid())


class Sandbox:
    """Runs Python programs; they see the standard library and an empty folder.

    is_isolated: False runs them with limits alone, with this process's files, network and rights.
    """

    def __init__(self, max_running: int | None = None, is_isolated: bool = True) -> None:
        self._is_isolated = is_isolated
        self._slots = asyncio.Semaphore(max_running or os.cpu_count() or 1)
        self._holder = tempfile.TemporaryDirectory(prefix="sandbox-")
        self.folder = self._holder.name  # an empty one of the host, over which each program's own files are laid
        self._python = os.path.realpath(sys.executable)

    def close(self) -> None:
        """Remove its folder."""
        self._holder.cleanup()

    async def check(self) -> None:
        """Run a program. Raises: OperatorError when this machine cannot lock one in, with what to change."""
        ran = await self.run("print(6 * 7)", limits=Limits(wall_s=60.0))
        if ran.output != "42\n":
            raise OperatorError(f"sandbox: a first program gave {ran.output!r}: {one_line(ran.errors)}")

    async def run(self, program: str, stdin: bytes = b"", limits: Limits | None = None) -> Ran:
        """Return what a program did. Waits for a place; cancelling ends the program.

        Raises: OperatorError when it could not be locked in: then nothing of it was run.
        """
        limits = limits or Limits()
        report = os.memfd_create("report")
        try:
            async with self._slots:
                process = await self._start(program, limits, report)
                try:
                    ran = await _watched(process, stdin, limits)
                finally:
                    _end(process)
                    await _gone(process)
            problem = os.pread(report, 500, 0).decode(errors="replace")
        finally:
            os.close(report)
        if problem:
            raise OperatorError(
                f"sandbox: this machine does not let a program be locked in ({one_line(problem)}). Allow user "
                "namespaces (sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns), or say "
                "that code of the policy may run anyhow: tools.python_unsafe = true, rewards.serve --unsafe-local-exec."
            )
        return ran

    async def _start(self, program: str, limits: Limits, report: int) -> Process:
        file = os.memfd_create("program")
        try:
            with open(file, "wb", closefd=False) as written:
                written.write(program.encode(errors="replace"))
            os.lseek(file, 0, os.SEEK_SET)
            return await asyncio.create_subprocess_exec(
                *(self._python, "-I", "-S", "-B", str(_INSIDE), json.dumps(self._spec(file, report, limits))),
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
                pass_fds=[file, report],
                env={},
                start_new_session=True,
            )
        finally:
            os.close(file)

    def _spec(self, file: int, report: int, limits: Limits) -> dict[str, object]:
        shown = [path for path in _SHOWN if os.path.lexists(path)]
        return {
            "program_fd": file,
            "report_fd": report,
            "folder": self.folder,
            "python": self._python,
            "shown": shown if self._python.startswith("/usr/") else [*shown, sys.base_prefix],
            "is_isolated": self._is_isolated,
            "uid": _FIRST_UID + next(_uids) % _NUM_UIDS,
            "refused_calls": refusing_filter().hex(),
            "cpu_s": math.ceil(limits.wall_s),
            "memory_bytes": limits.memory_bytes,
            "num_processes": limits.num_processes,
        }


async def _watched(process: Process, stdin: bytes, limits: Limits) -> Ran:
    """Return what a process prints until it ends, or until it has to be ended."""
    assert process.stdout is not None
    assert process.stderr is not None
    printed, errors = bytearray(), bytearray()
    feeding = asyncio.ensure_future(_feed(process, stdin))
    reading = asyncio.gather(
        _read(process.stdout, printed, limits.output_bytes), _read(process.stderr, errors, limits.output_bytes)
    )
    how: Literal["exit", "time", "output"] = "exit"
    code = 0
    try:
        async with asyncio.timeout(limits.wall_s):
            await reading
            code = await process.wait()
    except TimeoutError:
        how = "time"
    except _TooMuch:
        how = "output"
    finally:
        reading.cancel()
        feeding.cancel()
        await asyncio.gather(reading, feeding, return_exceptions=True)
    return Ran(_text(printed), _text(errors), how, code if code >= 0 else 128 - code)


class _TooMuch(Exception):
    """More was printed than is kept."""


async def _read(stream: asyncio.StreamReader, into: bytearray, most: int) -> None:
    """Read to the stream's end. Raises: _TooMuch once there is more than is kept."""
    while chunk := await stream.read(1 << 16):
        room = most - len(into)
        into += chunk[:room]
        if len(chunk) > room:
            raise _TooMuch


async def _feed(process: Process, stdin: bytes) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(stdin)
        await process.stdin.drain()
    except (BrokenPipeError, ConnectionResetError):
        pass  # the program did not want to read it
    finally:
        process.stdin.close()


def _end(process: Process) -> None:
    """End a process and all that it started: with the first one of its namespace the kernel ends the others."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


async def _gone(process: Process) -> None:
    """Return once an ended process and its pipes are gone.

    Its pipes are read to their ends, which nobody wants any more: asyncio says that a process has ended only when they
    are closed, and one that is full and not read is never closed.
    """
    assert process.stdin is not None
    try:
        # Where nothing is locked in, a process that left its group may hold them open.
        async with asyncio.timeout(_EMPTY_S):
            for stream in (process.stdout, process.stderr):
                while stream is not None and await stream.read(1 << 16):
                    pass
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                await process.stdin.wait_closed()
    except TimeoutError:
        process._transport.close()  # type: ignore[attr-defined]  # asyncio offers no other way to let go of pipes
    await process.wait()


def _text(printed: bytearray) -> str:
    return bytes(printed).decode(errors="replace")
