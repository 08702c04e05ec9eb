"""Lines of the command itself on standard output and error, whose reader may have left (`| head`)."""

import os
import sys
from typing import TextIO


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
