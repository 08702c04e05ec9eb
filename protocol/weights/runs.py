"""Cuts a sequence into runs of limited size: buckets of a push, shards of a state or a model."""

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def cut_into_runs(items: Sequence[T], size_of: Callable[[T], int], limit: int) -> list[list[T]]:
    """Return the items in order, in runs with a total size of at most `limit`. A larger item gets its own run.

    Example: sizes 48, 48, 48 and 208 with a limit of 100 give [48, 48], [48], [208].
    """
    runs: list[list[T]] = []
    filled = 0
    for item in items:
        size = size_of(item)
        if not runs or filled + size > limit:
            runs.append([])
            filled = 0
        runs[-1].append(item)
        filled += size
    return runs
