"""What is asked of and known about vLLM's own processes: leave to use the CPU's matrix tiles, and how one ended."""

import ctypes
import platform
import signal
from collections.abc import Callable, Iterable
from typing import Any, Protocol

_ARCH_PRCTL = 158  # the system call's number on x86-64
_REQUEST_STATE = 0x1023  # ARCH_REQ_XCOMP_PERM
_TILE_DATA = 18  # the state that AMX instructions use


class ChildProcess(Protocol):
    """The part of `multiprocessing.Process` that tells how it ended."""

    @property
    def name(self) -> str: ...
    @property
    def exitcode(self) -> int | None: ...


def allow_matrix_tiles(syscall: Callable[[int, int, int], int] | None = None) -> None:
    """Ask Linux to let this process use AMX, which bfloat16 attention on CPUs does; elsewhere the refusal is ignored.

    Without leave the first such instruction ends the process by SIGILL. Leave does not survive exec, so each of vLLM's
    processes has to ask. syscall: in place of the C library's.
    """
    if (platform.system(), platform.machine()) == ("Linux", "x86_64"):
        (syscall or ctypes.CDLL(None).syscall)(_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA)


def processes_of(llm: Any) -> tuple[ChildProcess, ...]:
    """Return the processes that vLLM started for this engine: once they are gone it drops its own references."""
    started = llm.engine_core.resources.engine_manager
    return tuple(started.processes) if started is not None else ()


def endings(processes: Iterable[ChildProcess]) -> str:
    """Return how those of these processes that are gone have ended. Example: "EngineCore died by SIGILL"."""
    return ", ".join(_ending(process.name, code) for process in processes if (code := process.exitcode) is not None)


def _ending(name: str, code: int) -> str:
    if code >= 0:
        return f"{name} ended with exit status {code}"
    try:
        return f"{name} died by {signal.Signals(-code).name}"
    except ValueError:
        return f"{name} died by signal {-code}"
