"""The run that uses this node's cluster. Only one may: a second would take its rollout servers.

The run's command holds the lock of a file in SLUICE_HOME, which the kernel releases when the command ends.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from pydantic import BaseModel, ConfigDict, ValidationError

from protocol.disk.lock import try_lock
from protocol.errors import OperatorError
from protocol.node.home import sluice_home
from protocol.node.identity import machine_name, process_space
from protocol.waits import until

# A reader holds the lock for microseconds, so a lock that stays taken for a second is another run's.
_LOCK_WITHIN_S = 1.0
_RETRY_S = 0.02


class CurrentRun(BaseModel):
    """The run that uses the cluster."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run_id: str
    folder: str  # absolute
    pid: int  # of its command
    started_at: float = 0.0  # Unix seconds at which the run got the cluster; 0: unknown
    log: str = ""  # file of its output; empty: a terminal or a pipe
    machine: str = ""  # name of the command's machine; empty: unknown
    processes: str = ""  # machine and container in which `pid` is unique; empty: unknown

    @property
    def pid_here(self) -> int | None:
        """Process number of its command on this machine; None: it runs on another machine that shares SLUICE_HOME."""
        return self.pid if self.processes in ("", process_space()) else None


@contextmanager
def using_cluster(run_id: str, folder: Path) -> Iterator[None]:
    """Keep other runs from this node's cluster within the block.

    Blocks for at most a second. Raises: OperatorError naming the run that uses it, or when SLUICE_HOME is read-only.
    """
    with _open_lock() as file:
        if not any(try_lock(file.fileno()) for _ in until(_LOCK_WITHIN_S, _RETRY_S)):
            raise OperatorError(refusal(_parse(file)))
        mine = CurrentRun(
            run_id=run_id,
            folder=str(folder),
            pid=os.getpid(),
            started_at=time.time(),
            log=_file_of_output(),
            machine=machine_name(),
            processes=process_space(),
        )
        try:
            file.truncate(0)
            # Unbuffered: a failure of a buffered write would appear when the file is closed.
            os.pwrite(file.fileno(), mine.model_dump_json().encode(), 0)
        except OSError as error:
            raise OperatorError(
                f"{_path()} cannot be written: {error.strerror}. Free the disk, then run again."
            ) from None
        try:
            yield
        finally:
            file.truncate(0)


def current_run() -> CurrentRun | None:
    """Return the run that uses this node's cluster now, None when there is none.

    Raises: OperatorError when SLUICE_HOME is closed to this user.
    """
    try:
        _path().stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _cannot_be_opened(error) from None
    with _open_lock() as file:
        return None if try_lock(file.fileno(), is_shared=True) else _parse(file)


def refusal(other: CurrentRun | None) -> str:
    """Return the error message for a second run. other: the run that uses the cluster; None: unknown."""
    if other is None:
        return "Another run is using this cluster. Wait for its end."
    of_machine, there = ("", "") if other.pid_here is not None else (f" of {other.machine}", " there")
    return (
        f"The run {other.run_id} is using this cluster (process {other.pid}{of_machine}, folder {other.folder}). Wait "
        f"for its end, end it with sluice runs stop{there}, or give SLUICE_HOME and ports of its own to a "
        "second cluster."
    )


def log_of_run(name: str) -> Path:
    """Return the file of a background run's output on this node."""
    return _logs() / f"{name}.log"


def logs_of_runs() -> list[Path]:
    """Return the output files of background runs on this node, newest first."""
    return sorted(_logs().glob("*.log"), key=lambda log: -log.stat().st_mtime)


def _logs() -> Path:
    return sluice_home().absolute() / "logs" / "runs"


def _file_of_output() -> str:
    """Return the file of standard output; empty when it is not a file."""
    try:
        path = Path(os.readlink("/proc/self/fd/1"))
    except OSError:
        return ""
    return str(path) if path.is_file() else ""


def _path() -> Path:
    return sluice_home() / "run.lock"


def _open_lock() -> TextIO:
    """Open the lock file. It is never removed: a removed file could be locked twice."""
    try:
        return open(os.open(_path(), os.O_RDWR | os.O_CREAT, 0o600), "r+", encoding="utf-8")
    except OSError as error:
        raise _cannot_be_opened(error) from None


def _cannot_be_opened(error: OSError) -> OperatorError:
    return OperatorError(f"{_path()} cannot be opened ({error.strerror}). Set SLUICE_HOME to a folder of your own.")


def _parse(file: TextIO) -> CurrentRun | None:
    """Return the run that holds the lock; None when it has not written its name yet."""
    file.seek(0)
    try:
        return CurrentRun.model_validate_json(file.read())
    except ValidationError:
        return None
