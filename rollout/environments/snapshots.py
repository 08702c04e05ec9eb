"""Snapshots of environments, from which another server resumes a conversation. Part of "turns survive a server"."""

import inspect
import json
from collections.abc import Iterator
from typing import Any

from protocol.errors import NeighbourError
from protocol.wire.conversation import MAX_SNAPSHOT_CHARACTERS
from rollout.environments.guard import ENVIRONMENT, GuardedEnvironment

_PLAYS = ("__init__", "reset", "step")


def snapshot_of(environment: GuardedEnvironment) -> str | None:
    """Return the environment's state as JSON; None when no other object can resume from it.

    Raises: NeighbourError("environment") for a state that is too long or that JSON would change.
    """
    inner: Any = environment.inner
    return environment.read(lambda: snapshot_text(inner.snapshot())) if is_resumable(type(inner)) else None


async def resume_from(environment: GuardedEnvironment, snapshot: str) -> None:
    """Resume a new environment, after its reset, from a snapshot. Raises: NeighbourError("environment")."""
    inner: Any = environment.inner
    await environment.call(lambda: inner.resume(json.loads(snapshot)), "did not resume")


def is_resumable(kind: type) -> bool:
    """Return whether an environment's class has a snapshot of its whole state.

    A subclass that overrides `__init__`, `reset` or `step` may have more state than the inherited snapshot. It needs a
    `snapshot` of its own.
    """
    if not callable(getattr(kind, "snapshot", None)) or not inspect.iscoroutinefunction(getattr(kind, "resume", None)):
        return False
    return _depth(kind, "snapshot") <= min(_depth(kind, name) for name in _PLAYS)


def snapshot_text(snapshot: Any) -> str | None:
    """Return a snapshot as JSON; None for None.

    Raises: NeighbourError("environment") for one that is too long or that JSON would change, TypeError and ValueError
    for one that JSON cannot carry.
    """
    if snapshot is None:
        return None
    text = json.dumps(snapshot, allow_nan=False)
    if len(text) > MAX_SNAPSHOT_CHARACTERS:
        problem = f"its snapshot has {len(text)} characters of JSON, at most {MAX_SNAPSHOT_CHARACTERS}"
        raise NeighbourError(ENVIRONMENT, problem)
    for key in _keys(snapshot):
        if not isinstance(key, str):
            problem = f"its snapshot has the key {key!r} ({type(key).__name__}), which JSON would turn into a text"
            raise NeighbourError(ENVIRONMENT, f"{problem}. Use texts as keys")
    return text


def _depth(kind: type, name: str) -> int:
    """Return the distance in the class hierarchy to the class that defines this name; 0: the class itself."""
    return next((place for place, each in enumerate(kind.__mro__) if name in vars(each)), len(kind.__mro__))


def _keys(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value
        value = list(value.values())
    for part in value if isinstance(value, list | tuple) else ():
        yield from _keys(part)
