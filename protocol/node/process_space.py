"""Which machine this is: its name for people, and whose process numbers are meant.

A folder that machines share holds what several of them wrote, and process 4711 of one is somebody else's on another.
"""

import os
import socket
from pathlib import Path


def machine_name() -> str:
    """Return what people call this machine."""
    return socket.gethostname()


def process_space() -> str:
    """Return a name that two processes share when the same numbers mean the same processes to both.

    That is since one start of one machine, and inside of one container. Empty where the system does not tell.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""
