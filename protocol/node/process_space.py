"""Which machine this is: its name for people, and whose process numbers are meant.

A folder that machines share holds what several of them wrote, and process 4711 of one is somebody else's on another.
"""

import os
import socket
from pathlib import Path

_STARTED = 19  # field 22 of proc(5)'s /proc/PID/stat, counted behind the name in brackets


def machine_name() -> str:
    """Return what people call this machine."""
    return socket.gethostname()


def started_ticks(pid: int) -> int | None:
    """Return when a process began, in ticks of the kernel since its own start; None where there is none, or it tells
    not.

    Unlike the time of day at which it began this never changes: that moves whenever the machine's clock is set.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", errors="replace").rpartition(")")[2].split()
        return int(fields[_STARTED])
    except (OSError, ValueError, IndexError):
        return None


def process_space() -> str:
    """Return a name that two processes share when the same numbers mean the same processes to both.

    That is since one start of one machine, and inside of one container. Empty where the system does not tell.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""
