"""One way to hang: what stands still, which limit bounds the wait for it, and what must be said when it has passed."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# What a way may take before its fault strikes: processes, imports, handshakes on a machine with no free core.
_SET_UP_S = 60.0
GRACE_S = 5.0
# The same where many ways run at a time, on a machine that may be busy besides.
BUSY_GRACE_S = 20.0

_fork = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Way:
    """run: brings the fault about and returns (what was said, seconds from the fault to that).

    It is called in a process of its own, which leads a process group: everything it forks is killed afterwards.
    """

    name: str
    limit_s: float  # the limit of the wait that meets the fault
    says: tuple[str, ...]  # what the sentence must hold: who, the wait, whom, the last progress
    run: Callable[[Path], tuple[str, float]]


@dataclass(frozen=True)
class Outcome:
    """What became of one way."""

    way: Way
    said: str  # the sentence; empty when nothing was said
    seconds: float | None  # from the fault to the sentence; None: it never came

    def has_hung(self, grace_s: float) -> bool:
        return self.seconds is None or self.seconds > self.way.limit_s + grace_s

    @property
    def missing(self) -> list[str]:
        """Return what the sentence should have named and did not."""
        return [] if self.seconds is None else [name for name in self.way.says if name not in self.said]


class RunningWay:
    """A way under way in a process of its own."""

    def __init__(self, way: Way, folder: Path) -> None:
        self.way = way
        self._pipe, theirs = _fork.Pipe()
        self._process = _fork.Process(target=_run, args=(way, folder, theirs))
        self._process.start()
        theirs.close()
        self._give_up_at = time.monotonic() + _SET_UP_S + way.limit_s + BUSY_GRACE_S

    def outcome(self) -> Outcome | None:
        """Return what became of it, None while it is under way. Nothing of it is left once it is told."""
        said: tuple[str, float | None] | None = None
        if self._pipe.poll():
            with suppress(EOFError):
                said = self._pipe.recv()
        if said is None and self._process.is_alive() and time.monotonic() < self._give_up_at:
            return None
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.join(10.0)
        return Outcome(self.way, *(said or ("", None)))


def _run(way: Way, folder: Path, pipe: Connection) -> None:
    os.setpgid(0, 0)
    folder.mkdir()
    try:
        said: Any = way.run(folder)
    except BaseException as error:
        said = (f"the way itself failed: {type(error).__name__}: {error}", 0.0)
    pipe.send(said)
    signal.pause()  # the group is killed whole


def fork(main: Callable[..., None], *arguments: Any) -> tuple[Any, Connection]:
    """Return a process of the way, and this end of its pipe: main(its end, *arguments)."""
    ours, theirs = _fork.Pipe()
    process = _fork.Process(target=main, args=(theirs, *arguments))
    process.start()
    theirs.close()
    return process, ours


def stop(pid: int) -> None:
    """Stop a process; returns when each of its threads stands still."""
    os.kill(pid, signal.SIGSTOP)
    while any(_state_of(thread) != "T" for thread in Path(f"/proc/{pid}/task").iterdir()):
        time.sleep(0.005)


def _state_of(thread: Path) -> str:
    return (thread / "stat").read_text().rpartition(")")[2].split()[0]


def raised_by(call: Callable[[], object]) -> str:
    """Return the text of what a call raises, or that it raised nothing."""
    try:
        call()
    except Exception as error:
        return str(error)
    return "nothing was raised"


def timed(call: Callable[[], str]) -> tuple[str, float]:
    """Return what a call says and how long that took, in seconds."""
    begun = time.monotonic()
    said = call()
    return said, time.monotonic() - begun
