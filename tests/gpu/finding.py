"""What one part of the proof found, in words and figures."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Finding:
    """What one part found on this machine."""

    sentence: str  # for people
    holds: bool | None  # None: it could not be checked here
    figures: dict[str, float] = field(default_factory=dict)  # with the unit in each name


@dataclass(frozen=True)
class Part:
    """One thing to be shown. It imports what it needs when it runs, so that parts run where others cannot."""

    name: str
    shows: str  # what holds when it holds
    needs: tuple[str, ...]  # packages
    num_gpus: int  # that it needs
    show: Callable[["Machine"], Finding]


@dataclass(frozen=True)
class Machine:
    """Where the parts run."""

    device: str  # "cuda", or "cpu" to try the parts themselves
    num_gpus: int  # that torch sees
    is_short: bool  # small shapes: seconds


def unchecked(reason: str) -> Finding:
    return Finding(reason, holds=None)


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
