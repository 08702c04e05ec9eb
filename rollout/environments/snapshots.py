"""Which environments another object of their class can go on with, and what it is given: their snapshot, as JSON."""

import inspect
import json
from collections.abc import Iterator
from typing import Any

from protocol.errors import NeighbourError
from protocol.wire.conversation import MAX_SNAPSHOT_CHARACTERS

_PLAYS = ("__init__", "reset", "step")


def is_resumable(kind: type) -> bool:
    """Return whether an environment's class has a snapshot that holds all of its state.

    A snapshot is of the class that defines it. One made from that class which plays otherwise may keep more than is in
    it, and would go on without: it needs a `snapshot` of its own.
    """
    if not callable(getattr(kind, "snapshot", None)) or not inspect.iscoroutinefunction(getattr(kind, "resume", None)):
        return False
    return _depth(kind, "snapshot") <= min(_depth(kind, name) for name in _PLAYS)


def snapshot_text(snapshot: Any) -> str | None:
    """Return a snapshot as JSON; None where nobody can go on from it.

    Raises: NeighbourError("environment") for one that is too long or would come back changed, TypeError and ValueError
    for one that JSON cannot carry.
    """
    if snapshot is None:
        return None
    text = json.dumps(snapshot, allow_nan=False)
    if len(text) > MAX_SNAPSHOT_CHARACTERS:
        problem = f"its snapshot has {len(text)} characters of JSON, at most {MAX_SNAPSHOT_CHARACTERS}"
        raise NeighbourError("environment", problem)
    for key in _keys(snapshot):
        if not isinstance(key, str):
            problem = f"its snapshot has the key {key!r} ({type(key).__name__}), which JSON gives back as a text"
            raise NeighbourError("environment", f"{problem}. Use texts as keys")
    return text


def _depth(kind: type, name: str) -> int:
    """Return how far above a class stands the one that defines this name, 0 for the class itself."""
    return next((place for place, each in enumerate(kind.__mro__) if name in vars(each)), len(kind.__mro__))


def _keys(value: Any) -> Iterator[Any]:
    """Yield every key inside a value that JSON can carry."""
    if isinstance(value, dict):
        yield from value
        value = list(value.values())
    for part in value if isinstance(value, list | tuple) else ():
        yield from _keys(part)
