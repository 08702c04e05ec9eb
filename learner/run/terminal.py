"""What ends a run from outside: Ctrl-C, SIGTERM, and a terminal that is closed."""

import contextlib
import errno
import os
import signal
import sys
import termios
import threading
from collections.abc import Iterator
from typing import TextIO

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """Turn the first Ctrl-C, SIGTERM or SIGHUP into an event; the second Ctrl-C interrupts as usual.

    A SIGHUP that is ignored already (nohup) stays ignored.
    """
    stop = threading.Event()

    def note(number: int, _: object) -> None:
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        if number == signal.SIGHUP:
            leave_closed_terminal()
        stop.set()

    taken = [number for number in _STOPPING if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in taken}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def leave_closed_terminal() -> None:
    """Send to nowhere what would be written to a terminal that is gone: each write there fails. Files stay."""
    for descriptor in (1, 2):
        try:
            termios.tcgetattr(descriptor)
        except termios.error as error:
            if error.args[0] == errno.EIO:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)


def say(text: str) -> None:
    """Print a line at once. A reader that has left changes nothing: what the command does is in the run folder."""
    try:
        print(text, flush=True)
    except OSError:
        _leave(sys.stdout)


def forget_unwritten() -> None:
    """Drop what could not be written: Python would try once more at its end, and print a complaint about it."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            _leave(stream)


def _leave(stream: TextIO) -> None:
    """Send what this stream is given from now on, and what waits in it, to nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
