"""Processes of the cluster: started detached, and recognised by pid and start time before they are ended."""

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import psutil

from protocol.errors import OperatorError
from protocol.http.listen import bind
from protocol.node.home import ProcessRecord
from protocol.node.identity import process_space, started_ticks

MARK = "SLUICE_CLUSTER_FOLDER"
"""Environment variable of every process that a start launches: the cluster's folder for Ray."""

_TERM_S = 10.0
_MANY_FILES, _FEW_FILES = 65_536, 8_192  # open files of a process: of a large run, and too few for one
_KILL_S = 5.0
_SAME_START_S = 0.05  # tolerance for records of earlier versions, which have no kernel ticks
# Shared memory of Ray, Python, torch and NCCL. A mapped file of another name is a user's, such as an index.
_SHARED_MEMORY = re.compile(r"/dev/shm/(?:plasma|psm_|torch_|nccl-|wnsm_|sem\.)[^/]*")  # noqa: S108


def allow_many_files() -> None:
    """Raise the limit of open files of this process and its children: each server, rank and agent has several.

    Prints a warning where the machine allows too few.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    raised = _MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, _MANY_FILES)
    if soft != resource.RLIM_INFINITY and soft < raised:
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
    if raised < _FEW_FILES:
        print(
            f"sluice start: a process may open {raised} files here (ulimit -Hn); hundreds of servers or agents need "
            f"{_MANY_FILES}. Raise LimitNOFILE, docker's --ulimit nofile or limits.conf.",
            file=sys.stderr,
        )


def search_path() -> str:
    """Return PATH with the programs of this Python's environment first."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"


def launch(
    name: str,
    command: Sequence[str],
    code: str,
    log: Path,
    environment: Mapping[str, str],
    url: str,
    folder: Path,
) -> ProcessRecord:
    """Start a process that outlives this one; `log` then holds its output alone. Returns its record.

    code: digest of the program's code. environment: all its variables. folder: its working folder.
    Raises: OperatorError when the log cannot be written or the shell does not start. An unknown command ends at once.
    """
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    except OSError as error:
        raise OperatorError(f"{name}: its log {log} cannot be written: {error.strerror}.") from None
    # A shell starts it and ends, so that it is not a child of this process. Children of Ray's workers end with them,
    # and a child that its parent does not wait for stays a zombie.
    detached = f'"$@" </dev/null >&{descriptor} 2>&{descriptor} {descriptor}>&- & echo $!'
    try:
        started = subprocess.run(  # noqa: S603  # the user's command; the shell's text is ours
            ["bash", "-c", detached, name, *command],  # noqa: S607  # as found on PATH
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env=dict(environment),
            cwd=folder,
            pass_fds=(descriptor,),
            start_new_session=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise OperatorError(f"{name}: {command[0]} cannot be run in {folder} ({error}).") from None
    finally:
        os.close(descriptor)
    pid = int(started.stdout)
    return ProcessRecord(
        name=name,
        pid=pid,
        started_at=_started_at(pid),
        ticks=started_ticks(pid),
        processes=process_space(),
        url=url,
        log=str(log),
        command=tuple(command),
        code=code,
    )


def find(record: ProcessRecord) -> psutil.Process | None:
    """Return the recorded process; None when it ended, even if another process has its pid now."""
    try:
        process = psutil.Process(record.pid)
        is_same = record.is_still(process.create_time(), _SAME_START_S)
        return process if is_same and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.NoSuchProcess:
        return None


def has_ended(process: psutil.Process) -> bool:
    """Return whether a process is gone, or a zombie."""
    try:
        return not process.is_running() or bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:  # it ended between the two calls
        return True


def family(roots: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Return these processes and their descendants, each once, without the calling process."""
    found: dict[int, psutil.Process] = {}
    for root in roots:
        try:
            for process in (root, *root.children(recursive=True)):
                found[process.pid] = process
        except psutil.NoSuchProcess:
            continue
    found.pop(os.getpid(), None)
    return list(found.values())


def find_own_processes(matches: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
    """Return this user's running processes for which `matches` is true, without the calling process."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.uids().real == os.getuid() and process.status() != psutil.STATUS_ZOMBIE and matches(process):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError):
            continue
    return [process for process in found if process.pid != os.getpid()]


def end(processes: Sequence[psutil.Process], term_s: float = _TERM_S) -> None:
    """End processes by SIGTERM, then SIGKILL; returns when they are gone, at most about 15 s later.

    Removes the shared memory of killed processes.
    Raises: OperatorError naming a process that cannot be ended.
    """
    shared = {path for process in processes for path in _shared_memory(process)}
    _signal(processes, signal.SIGTERM)
    _, left = psutil.wait_procs(processes, timeout=term_s)
    _signal(left, signal.SIGKILL)
    _, left = psutil.wait_procs(left, timeout=_KILL_S)
    stuck = [process for process in left if not has_ended(process)]
    if stuck:
        raise OperatorError(f"Process {stuck[0].pid} ({stuck[0].name()}) cannot be ended. Look at it with ps.")
    for path in shared:
        with contextlib.suppress(OSError):  # another owner's
            path.unlink(missing_ok=True)


def check_port(service: str, host: str, port: int, flag: str) -> None:
    """Raise OperatorError unless `port` is free, naming the process in the way if known. Port 0 checks `host` only."""
    try:
        bind(service, host, 0).close()
    except OperatorError:
        raise OperatorError(
            f"{host}, wanted by the {service}, is not an address of this machine. "
            "`ip -brief address` lists its addresses."
        ) from None
    try:
        bind(service, host, port).close()
    except OperatorError:
        raise OperatorError(
            f"Port {port} of {host}, wanted by the {service}, is taken{_listener(port)}. "
            f"Stop that process, or choose another port with {flag}."
        ) from None


def last_lines(log: Path) -> str:
    """Return the last five lines of a log as one line, for an error message."""
    try:
        lines = [
            line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()
        ]
    except OSError:
        return "its log cannot be read"
    return " | ".join(lines[-5:]) or "its log is empty"


def _listener(port: int) -> str:
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr[1:] == (port,) and connection.pid:
                process = psutil.Process(connection.pid)
                return f" by process {process.pid} ({process.name()})"
    except (psutil.AccessDenied, psutil.NoSuchProcess):
        pass  # another user's process: only root sees its name
    return ""


def _started_at(pid: int) -> float:
    """Return the Unix time of a process's start; 0 when it has ended: then `find` returns None."""
    try:
        return psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        return 0.0


def _signal(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue


def _shared_memory(process: psutil.Process) -> set[Path]:
    """Return the named shared-memory files that a process has mapped."""
    try:
        maps = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()
    paths = (line.split(maxsplit=5)[-1] for line in maps.splitlines())
    return {Path(path) for path in paths if _SHARED_MEMORY.fullmatch(path) and not path.endswith("(deleted)")}
