"""A small disk of its own for a run, so that it can be full."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.chaos.soak.nemesis import Lasting

_DISK_BYTES = 600 << 20
_FULL_S = 20.0
_CHUNK_BYTES = 1 << 20


@contextlib.contextmanager
def own_disk(folder: Path) -> Iterator[Path | None]:
    """Yield a file system of 600 MiB, gone afterwards; None where this user may not mount one."""
    disk = folder / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "soak", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        print("soak: the disk stays as it is: nothing can be mounted here")
        yield None
        return
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], capture_output=True, check=False)


def filled(disk: Path) -> Lasting:
    """Return the fault that nothing more fits there, for 20 s."""
    ballast = disk / "ballast"
    return Lasting(lambda: _fill(ballast), lambda: ballast.unlink(missing_ok=True), _FULL_S)


def _fill(path: Path) -> None:
    try:
        with path.open("wb", buffering=0) as file:
            while file.write(bytes(_CHUNK_BYTES)) == _CHUNK_BYTES:
                pass
    except OSError:
        return  # full
