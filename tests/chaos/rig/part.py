"""One forked process of a rigged run, and the rig's end of its pipe."""

import importlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from protocol import failpoints

_fork = multiprocessing.get_context("fork")


@dataclass
class Part:
    """A process of the run and the rig's end of its pipe."""

    name: str
    process: Any
    pipe: Connection

    def tell(self, *message: Any) -> None:
        """Send a command; one that died meanwhile is noticed elsewhere."""
        try:
            self.pipe.send(message)
        except (BrokenPipeError, ConnectionResetError):
            return

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)

    def bury(self) -> None:
        if self.process.is_alive():
            self.kill()
        self.process.join(10.0)
        self.pipe.close()


def fork_part(
    name: str, living: Iterable[Part], failpoint: str | None, main: Callable[..., None], *arguments: Any
) -> Part:
    """Return a new process that calls main(its end of a pipe, *arguments).

    living: the run's other processes. failpoint: where it dies (`protocol.failpoints`), None for nowhere.
    """
    ours, theirs = _fork.Pipe()
    child = (name, [*(part.pipe for part in living), ours], failpoint, main, theirs, *arguments)
    process = _fork.Process(target=_child, args=child, daemon=True)
    process.start()
    theirs.close()
    return Part(name, process, ours)


def _child(
    name: str, inherited: list[Connection], failpoint: str | None, main: Callable[..., None], *arguments: Any
) -> None:
    """A forked process's life. inherited: the rig's ends of pipes; kept open, they would hide the rig's death."""
    for pipe in inherited:
        pipe.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if failpoint is not None:
        os.environ[failpoints.VARIABLE] = failpoint
        importlib.reload(failpoints)
    try:
        main(*arguments)
    except BaseException as error:
        print(f"[{name}] {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        raise
