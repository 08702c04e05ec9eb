"""Waiting in a test for what must come: long enough for a machine without a free core, and no longer than it takes."""

import time
from collections.abc import Callable

LIMIT_S = 30.0


def wait_until(is_so: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    """Return once this is so. Raises: AssertionError after limit_s."""
    deadline = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline, f"not so within {limit_s:g} s"
        time.sleep(0.01)
