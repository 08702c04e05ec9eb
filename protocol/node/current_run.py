"""Which run uses this node's cluster: one at a time, because a second would take the first one's rollout servers.

The run's command locks a file in SLUICE_HOME for as long as it runs; the lock goes with its process, however that
ends.
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
from protocol.node.process_space import machine_name, process_space
from protocol.waits import until

# Somebody who only asks holds the lock for microseconds.
_ASK_S = 1.0
_RETRY_S = 0.02


class CurrentRun(BaseModel):
    """The run that uses the cluster."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run_id: str  # name of the run
    folder: str  # the run's, as an absolute path
    pid: int  # of its command
    started_at: float = 0.0  # Unix seconds at which the command got the cluster; 0: an older command's
    log: str = ""  # file that its output goes to; empty: a terminal or a pipe
    machine: str = ""  # name of its command's; empty: an older command's
    processes: str = ""  # of which machine and container `pid` is a number (`process_space`); empty: not known

    @property
    def pid_here(self) -> int | None:
        """Its command's process among those of this machine; None: it is another's, which shares SLUICE_HOME."""
        return self.pid if self.processes in ("", process_space()) else None


@contextmanager
def using_cluster(run_id: str, folder: Path) -> Iterator[None]:
    """Keep other runs from this node's cluster within the block.

    Raises: OperatorError naming the run that uses it, or when SLUICE_HOME cannot be written. Blocks for a second
    at most.
    """
    with _open_lock() as file:
        if not any(try_lock(file.fileno()) for _ in until(_ASK_S, _RETRY_S)):
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
            os.pwrite(
                file.fileno(), mine.model_dump_json().encode(), 0
            )  # buffered, its failure would come at the close
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


def log_of_run(name: str) -> Path:
    """Return where a run of this name that is started in the background has its output on this node."""
    return _logs() / f"{name}.log"


def logs_of_runs() -> list[Path]:
    """Return the output of the runs that were started in the background here, newest first."""
    return sorted(_logs().glob("*.log"), key=lambda log: -log.stat().st_mtime)


def _logs() -> Path:
    return sluice_home().absolute() / "logs" / "runs"


def _file_of_output() -> str:
    """Return the file that standard output goes to; empty where it is none."""
    try:
        path = Path(os.readlink("/proc/self/fd/1"))
    except OSError:
        return ""
    return str(path) if path.is_file() else ""


def _path() -> Path:
    return sluice_home() / "run.lock"


def _open_lock() -> TextIO:
    """Open the lock's file, which stays where it is: one that is removed could be locked twice."""
    try:
        return open(os.open(_path(), os.O_RDWR | os.O_CREAT, 0o600), "r+", encoding="utf-8")
    except OSError as error:
        raise _cannot_be_opened(error) from None


def _cannot_be_opened(error: OSError) -> OperatorError:
    return OperatorError(f"{_path()} cannot be opened ({error.strerror}). Set SLUICE_HOME to a folder of your own.")


def _parse(file: TextIO) -> CurrentRun | None:
    """Return whose lock it is, None for one who has it and has not signed yet."""
    file.seek(0)
    try:
        return CurrentRun.model_validate_json(file.read())
    except ValidationError:
        return None


def refusal(other: CurrentRun | None) -> str:
    """Return what to say to who wants the cluster while this run has it. other: None: it has not told its name yet."""
    if other is None:
        return "Another run is using this cluster. Wait for its end."
    of_machine, there = ("", "") if other.pid_here else (f" of {other.machine}", " there")
    return (
        f"The run {other.run_id} is using this cluster (process {other.pid}{of_machine}, folder {other.folder}). Wait "
        f"for its end, end it with python -m deploy.runs stop{there}, or give SLUICE_HOME and ports of its own to a "
        "second cluster."
    )
