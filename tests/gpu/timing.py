"""Seconds that work on a device takes."""

import time
from collections.abc import Callable


def seconds_of(work: Callable[[], object], device: str, times: int = 5) -> list[float]:
    """Return the seconds of each of several runs after one that does not count; waits for the device."""
    work()
    _wait(device)
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        work()
        _wait(device)
        taken.append(time.perf_counter() - started)
    return taken


def _wait(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
