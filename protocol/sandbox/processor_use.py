"""Tells a program that slept from one that waited for a processor, so that a full machine makes no program late."""

import contextlib
from dataclasses import dataclass
from pathlib import Path

import psutil

_RUNNABLE = (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP)


@dataclass(frozen=True)
class ProcessorUse:
    """What a process and its descendants did since their start."""

    used_s: float  # processor time, of ended processes too
    waited_s: float  # time in which threads were ready to run but had no processor
    is_runnable: bool  # whether one of them runs now, or waits for a processor or a disk


def processor_use(pid: int) -> ProcessorUse:
    """Return the processor use of a process tree; zeros if it is gone. Source: proc(5), schedstat: run-queue delay."""
    used_s, waited_s, is_runnable = 0.0, 0.0, False
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.Error, OSError):
                times = process.cpu_times()
                used_s += times.user + times.system + times.children_user + times.children_system
                is_runnable |= process.status() in _RUNNABLE
                for path in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
                    waited_s += int(path.read_text().split()[1]) / 1e9
    return ProcessorUse(used_s, waited_s, is_runnable)
