"""Runs programs in the sandbox: at most `max_running` at a time, each in a process that is gone when its run ends.

Own code and not bubblewrap: it offers no limit on the memory of all processes together, takes a system call filter as
an input, and is seldom installed. With it, this folder would be longer.
"""

import asyncio
import contextlib
import itertools
import json
import math
import os
import signal
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import psutil

from protocol.errors import NeighbourError, OperatorError
from protocol.one_line import one_line
from protocol.sandbox.system_calls import refusing_filter

_RUNNABLE = (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP)
_INSIDE = Path(__file__).with_name("inside.py")
_VISIBLE = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/dev/null", "/dev/zero", "/dev/urandom")
# User ids outside the range of any system. The kernel counts processes per user id.
_FIRST_UID, _NUM_UIDS = 1_900_000_000, 100_000
_DRAIN_S = 10.0
# A program without a processor may take this many times its time limit, and at least so many seconds.
_MOST_WALLS, _LEAST_MOST_S = 4, 60.0
_OUT_OF_CPU_TIME = 128 + signal.SIGXCPU
_uids = itertools.count(os.getpid())


@dataclass(frozen=True)
class Limits:
    """Limits of one program, including the processes it starts."""

    wall_s: float = 10.0  # time from its start to its end, without waiting for a processor; processor time of all
    cpu_s: int | None = None  # processor time of each process; None: wall_s
    lower_priority_after_s: float | None = None  # then other programs come first; None: never
    memory_bytes: int = 512 << 20  # address space per process, and memory of all of them; files: another quarter
    output_bytes: int = 64 << 10  # limit for stdout and for stderr; a program that exceeds it is killed
    num_processes: int = 32  # processes and threads at a time


@dataclass(frozen=True)
class ProgramResult:
    """Output and end of a program."""

    output: str  # stdout, at most Limits.output_bytes
    errors: str  # stderr, likewise
    how: Literal["exit", "time", "output"]  # exit: the program ended; time, output: it exceeded that limit
    exit_code: int  # 0: success; 128 + n: killed by signal n; valid if `how` is exit


class Sandbox:
    """Runs Python programs that see the standard library and an empty folder.

    is_isolated: False applies the limits only; programs have this process's files, network and rights.
    """

    def __init__(self, max_running: int | None = None, is_isolated: bool = True) -> None:
        self._is_isolated = is_isolated
        self._slots = asyncio.Semaphore(max_running or os.cpu_count() or 1)
        self._holder = tempfile.TemporaryDirectory(prefix="sandbox-")
        self.folder = self._holder.name  # empty host folder; each program's root is mounted over it
        self._python = os.path.realpath(sys.executable)

    def close(self) -> None:
        """Delete the folder."""
        self._holder.cleanup()

    async def check(self) -> None:
        """Run a known program. Raises: OperatorError, with the remedy, if this machine cannot isolate it."""
        result = await self.run("print(6 * 7)", limits=Limits(wall_s=60.0))
        if result.output != "42\n":
            raise OperatorError(f"sandbox: a test program printed {result.output!r}: {one_line(result.errors)}")

    async def run(self, program: str, stdin: bytes = b"", limits: Limits | None = None) -> ProgramResult:
        """Return the result of a program. Waits for a free slot; cancelling kills the program.

        Raises: OperatorError if the program could not be isolated; then it was not started. NeighbourError if the
        machine was so full that the program got no processor.
        """
        limits = limits or Limits()
        report = os.memfd_create("report")
        try:
            async with self._slots:
                process = await self._start(program, stdin, limits, report)
                try:
                    result = await _watch(process, limits)
                finally:
                    _kill(process)
                    await _wait_until_gone(process)
            problem = os.pread(report, 500, 0).decode(errors="replace")
        finally:
            os.close(report)
        if problem:
            raise OperatorError(
                f"sandbox: this machine cannot isolate a program ({one_line(problem)}). Allow user namespaces "
                "(sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns), or run the policy's "
                "code without isolation: tools.python_unsafe = true, rewards.serve --unsafe-local-exec."
            )
        return result

    async def _start(self, program: str, stdin: bytes, limits: Limits, report: int) -> Process:
        with contextlib.ExitStack() as files:
            file = files.enter_context(_open_with(program.encode(errors="replace"))).fileno()
            return await asyncio.create_subprocess_exec(
                *(self._python, "-I", "-S", "-B", str(_INSIDE), json.dumps(self._spec(file, report, limits))),
                stdin=files.enter_context(_open_with(stdin)),
                stdout=PIPE,
                stderr=PIPE,
                pass_fds=[file, report],
                env={},
                start_new_session=True,
            )

    def _spec(self, file: int, report: int, limits: Limits) -> dict[str, object]:
        visible = [path for path in _VISIBLE if os.path.lexists(path)]
        return {
            "program_fd": file,
            "report_fd": report,
            "folder": self.folder,
            "python": self._python,
            "visible": visible if self._python.startswith("/usr/") else [*visible, sys.base_prefix],
            "is_isolated": self._is_isolated,
            "uid": _FIRST_UID + next(_uids) % _NUM_UIDS,
            "refused_calls": refusing_filter().hex(),
            "cpu_s": limits.cpu_s or math.ceil(limits.wall_s),
            "memory_bytes": limits.memory_bytes,
            "lower_priority_after_s": limits.lower_priority_after_s,
            "num_processes": limits.num_processes,
        }


def _open_with(content: bytes) -> BinaryIO:
    """Return a file in memory at its start. A program may seek in it, and open it again as /dev/stdin."""
    file = open(os.memfd_create("sandbox"), "w+b")  # noqa: SIM115
    file.write(content)
    file.seek(0)
    return file


async def _watch(process: Process, limits: Limits) -> ProgramResult:
    """Return the result of a process once it ends or exceeds a limit."""
    assert process.stdout is not None
    assert process.stderr is not None
    printed, errors = bytearray(), bytearray()
    outputs = ((process.stdout, printed), (process.stderr, errors))
    reading = [asyncio.ensure_future(_read(stream, into, limits.output_bytes)) for stream, into in outputs]
    ending = asyncio.ensure_future(_end(process, reading))
    how: Literal["exit", "time", "output"] = "exit"
    code = 0
    try:
        is_late = not await _ends_in_time(process, ending, limits.wall_s)
        code = 0 if is_late else ending.result()
        if is_late or code in (_OUT_OF_CPU_TIME, -signal.SIGXCPU):
            how = "time"
    except _TooMuchOutput:
        how = "output"
    finally:
        # Each by itself: cancelling a gather that has failed does not cancel the rest of it.
        for task in (*reading, ending):
            task.cancel()
        await asyncio.gather(*reading, ending, return_exceptions=True)
    return ProgramResult(_text(printed), _text(errors), how, code if code >= 0 else 128 - code)


async def _end(process: Process, reading: Sequence[asyncio.Future[None]]) -> int:
    """Return the exit code of a process that has closed its output."""
    await asyncio.gather(*reading)
    return await process.wait()


async def _ends_in_time(process: Process, ending: asyncio.Future[int], wall_s: float) -> bool:
    """Return whether a process ended; False if it slept or ran for wall_s, without its waits for a processor.

    Raises: NeighbourError if the machine is too full to know.
    """
    started, left_s = time.monotonic(), wall_s
    most_s = max(_MOST_WALLS * wall_s, _LEAST_MOST_S)
    while not (await asyncio.wait([ending], timeout=left_s))[0]:
        use = processor_use(process.pid)
        elapsed_s = time.monotonic() - started
        left_s = wall_s + use.waited_s - elapsed_s
        if process.returncode is not None or use.used_s >= wall_s or (left_s <= 0 and not use.is_runnable):
            return False
        if elapsed_s >= most_s:
            raise NeighbourError(
                "sandbox",
                f"in {elapsed_s:.0f} s a program got {use.used_s:.1f} s of processor time and waited "
                f"{use.waited_s:.0f} s for a processor. Run fewer processes on this machine, or give it more cores",
            )
        left_s = min(max(left_s, wall_s / 10), most_s - elapsed_s)
    return True


class _TooMuchOutput(Exception):
    """The output exceeds its limit."""


async def _read(stream: asyncio.StreamReader, into: bytearray, most: int) -> None:
    """Read to the end of the stream. Raises: _TooMuchOutput above `most` bytes."""
    while chunk := await stream.read(1 << 16):
        room = most - len(into)
        into += chunk[:room]
        if len(chunk) > room:
            raise _TooMuchOutput


def _kill(process: Process) -> None:
    """Kill a process group. With the first process of a PID namespace the kernel kills the others."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


async def _wait_until_gone(process: Process) -> None:
    """Return once a killed process and its pipes are gone.

    asyncio reports the end of a process only after its pipes are closed. A full pipe closes only if it is drained.
    """
    try:
        # Without isolation a process that left the group may hold them open.
        async with asyncio.timeout(_DRAIN_S):
            for stream in (process.stdout, process.stderr):
                while stream is not None and await stream.read(1 << 16):
                    pass
    except TimeoutError:
        process._transport.close()  # type: ignore[attr-defined]  # asyncio has no public way to close the pipes
    await process.wait()


def _text(printed: bytearray) -> str:
    return bytes(printed).decode(errors="replace")


@dataclass(frozen=True)
class ProcessorUse:
    """What a process and its descendants did since their start.

    It tells a program that slept from one that waited for a processor, so that a full machine makes no program late.
    """

    used_s: float  # processor time, of ended processes too
    waited_s: float  # time in which threads were ready to run but had no processor
    is_runnable: bool  # whether one of them runs now, or waits for a processor or a disk


def processor_use(pid: int) -> ProcessorUse:
    """Return the processor use of a process tree; zeros if it is gone. Source: proc(5), schedstat: run-queue delay."""
    used_s, waited_s, is_runnable = 0.0, 0.0, False
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.Error, OSError):
                times = process.cpu_times()
                used_s += times.user + times.system + times.children_user + times.children_system
                is_runnable |= process.status() in _RUNNABLE
                for path in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
                    waited_s += int(path.read_text().split()[1]) / 1e9
    return ProcessorUse(used_s, waited_s, is_runnable)
