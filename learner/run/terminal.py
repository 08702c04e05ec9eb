"""Signals that end a run, a closed terminal, and output whose reader has left (`| head`)."""

import contextlib
import errno
import os
import shutil
import signal
import sys
import termios
import textwrap
import threading
from collections.abc import Iterator

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stop(threading.Event):
    """Set by the first signal that ends a run."""

    is_by_user = False  # True: that signal was Ctrl-C


@contextlib.contextmanager
def stop_signals() -> Iterator[Stop]:
    """Turn the first Ctrl-C, SIGTERM or SIGHUP into an event; the second Ctrl-C interrupts as usual.

    A SIGHUP that is ignored already (nohup) stays ignored.
    """
    stop = Stop()

    def note(number: int, _: object) -> None:
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        if number == signal.SIGHUP:
            leave_closed_terminal()
        stop.is_by_user = stop.is_by_user or number == signal.SIGINT
        stop.set()

    taken = [number for number in _STOPPING if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in taken}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def leave_closed_terminal() -> None:
    """Redirect standard output and error to /dev/null if their terminal is gone; files stay."""
    for descriptor in (1, 2):
        try:
            termios.tcgetattr(descriptor)
        except termios.error as error:
            if error.args[0] == errno.EIO:
                _redirect(descriptor)


def say(text: str) -> None:
    """Print a line at once, on a terminal without a word that is broken over two lines.

    The command continues without a reader: its results are in the run folder.
    """
    if sys.stdout.isatty():
        columns = shutil.get_terminal_size().columns
        text = textwrap.fill(text, columns, break_long_words=False, break_on_hyphens=False)
    try:
        print(text, flush=True)
    except OSError:
        _redirect(sys.stdout.fileno())


def drop_unwritten() -> None:
    """Drop unwritten output: Python would try to write it again at exit and print an error."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            _redirect(stream.fileno())


def _redirect(descriptor: int) -> None:
    """Send an output, and the buffer of its stream, to /dev/null."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
