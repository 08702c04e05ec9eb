"""Locks between processes: flock on a file or folder. The kernel releases a lock when its process ends."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from protocol.waits import until

_POLL_S = 0.02


@contextmanager
def file_lock(path: Path, *, wait_s: float = 0.0) -> Iterator[int]:
    """Hold the lock of a file, or of an existing folder, within the block. Yields the open descriptor.

    The file is created and stays: two processes could lock a name that was removed and created again.
    wait_s: longest wait for another holder; math.inf waits until the lock is free.
    Raises: BlockingIOError when another process holds it, OSError when the file cannot be opened.
    """
    kind = os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT
    descriptor = os.open(path, kind, 0o666)
    try:
        if not any(try_lock(descriptor) for _ in until(wait_s, _POLL_S)):
            raise BlockingIOError(f"{path} is locked by another process")
        yield descriptor
    finally:
        os.close(descriptor)


def is_locked(path: Path) -> bool:
    """Return whether a process of this machine holds the lock of a file; False where the kernel lists no locks.

    It takes no lock, not even for a moment: a process that starts in that moment would be refused.
    """
    try:
        inode, held = path.stat().st_ino, Path("/proc/locks").read_text().splitlines()
    except OSError:
        return False
    return any(" FLOCK " in line and "->" not in line and f":{inode} " in line for line in held)


def try_lock(descriptor: int, *, is_shared: bool = False) -> bool:
    """Lock an open file until it is closed; False when another process holds it.

    is_shared: several processes may hold the lock at the same time. Raises: OSError where the disk has no locks.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
