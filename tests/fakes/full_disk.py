"""A disk without room: files can be made, and nothing can be written into them."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager

WHY = "File too large"  # a full disk says "No space left on device"; both are OSErrors of the write


@contextmanager
def full_disk() -> Iterator[None]:
    """Have the operating system refuse this process every byte of a file within the block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
