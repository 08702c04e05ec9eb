"""Foreign text as one line that can be logged, sent and shown, without line breaks and unencodable characters."""

import os
import re
import sysconfig
import traceback
from pathlib import Path

_BREAKS = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]+")
_INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
_CHECKOUT = Path(__file__).resolve().parents[1]
ROOMS = ("protocol", "learner", "rollout", "rewards", "retriever", "deploy")
_SLUICE = tuple(f"{_CHECKOUT / room}{os.sep}" for room in ROOMS)


def one_line(text: object, max_characters: int = 500) -> str:
    """Return str(text) with each run of control characters and line breaks as one space, cut to max_characters.

    Lone surrogates become "?". An object with a failing __str__ is shown by its type.
    Example: one_line("down\n12:00 INFO all is well") == "down 12:00 INFO all is well"
    """
    try:
        plain = str(text)
    except Exception:  # a user's exception or value may have a __str__ that fails
        plain = f"<{type(text).__name__} without a text>"
    # Cut first, because the rest takes time in proportion; breaks at the ends may cost a few characters.
    plain = plain[: 2 * max_characters].encode(errors="replace").decode()
    return _BREAKS.sub(" ", plain).strip()[:max_characters]


def first_line(error: BaseException | None) -> str:
    """Return the first line of an exception's text; its type without one."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def describe_error(error: BaseException) -> str:
    """Return an exception as one line: type, text and the line of code that raised it, a user's line if there is one.

    Example: "KeyError: 'board' (/home/me/my_env.py:12)"
    """
    place = place_of(error)
    return f"{type(error).__name__}: {one_line(error)}" + (f" ({place})" if place else "")


def place_of(error: BaseException) -> str:
    """Return FILE:LINE of the innermost call in a user's file, else outside of installed packages, else of all."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((*_INSTALLED, "<"))]
    return user_line(error) or "".join(f"{frame.filename}:{frame.lineno}" for frame in (own or frames)[-1:])


def user_line(error: BaseException) -> str | None:
    """Return FILE:LINE of the innermost call in a user's file; None when all calls are Sluice's or a library's."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename.startswith(os.sep) and not frame.filename.startswith((*_INSTALLED, *_SLUICE)):
            return f"{frame.filename}:{frame.lineno}"
    return None
