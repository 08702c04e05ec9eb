"""What a process of a cluster is, read from outside; one that ends meanwhile is nothing."""

import psutil


def title_of(process: psutil.Process) -> str:
    """Return a process's command line as it stands now: Ray and vLLM write there what it is."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def has_open(process: psutil.Process, part: str) -> bool:
    """Return whether a process has a file open in whose path this stands."""
    try:
        return any(part in file.path for file in process.open_files())
    except psutil.Error:
        return False
