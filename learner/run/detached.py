"""`--no-wait`: the same command in the background, with its output in a file."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from learner.disk.run_folder import SETTINGS
from learner.run.terminal import say
from protocol.errors import OperatorError
from protocol.node.current_run import current_run, log_of_run, refusal
from protocol.waits import until

OPTION = "--no-wait"
_POLL_S = 0.1
_TAIL_LINES = 5
_BORDERS = ("│", "┃", "├", "└")  # of a table
# Encoding and checking the rows of a large data set takes minutes.
_CHECKS_S = 1800.0


def start_detached(arguments: Sequence[str], folder: Path) -> int:
    """Start `sluice run ARGUMENTS` in a session of its own; returns the exit status of this command.

    folder: the run's. Raises: OperatorError when another run has the cluster; as `wait_until_begun` does.
    """
    if (other := current_run()) is not None:
        raise OperatorError(refusal(other))  # before its output file is overwritten: it may have this name too
    log, before = log_of_run(folder.name), stamp_of(folder)
    log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with contextlib.suppress(FileNotFoundError):  # it has the reason why the resumed run ended
        log.replace(log.with_name(f"{log.name}.previous"))
    with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as output:
        command = [sys.executable, "-Pm", "learner.run", *(part for part in arguments if part != OPTION)]
        run = subprocess.Popen(  # noqa: S603  # our own module, without a shell
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        return wait_until_begun(run, log, before)
    except KeyboardInterrupt:
        run.terminate()
        raise


def wait_until_begun(run: "subprocess.Popen[bytes]", log: Path, before: object) -> int:
    """Return 0 once a run has begun: it has the cluster, and its folder is ready.

    If it ends before, print the end of its output and return its exit status.

    before: `stamp_of` its folder before the start. Raises: OperatorError after half an hour without either, or when a
    signal ended it.
    """
    for _ in until(_CHECKS_S, _POLL_S):
        current = current_run()
        is_its = current is not None and current.pid == run.pid
        if current is not None and is_its and stamp_of(Path(current.folder)) not in (None, before):
            say(
                f"The run {current.run_id} continues in the background (process {run.pid}). Its output: {log}. "
                "sluice runs lists, shows and stops it."
            )
            return 0
        if (status := run.poll()) is not None:
            if tail := _tail(log.read_text(encoding="utf-8", errors="replace")):
                print(*tail, sep="\n", file=sys.stderr)
            if status < 0:  # such as the kernel's SIGKILL when memory is short
                raise OperatorError(f"The run was ended by {signal.Signals(-status).name} before it began. See {log}.")
            return status
    raise OperatorError(f"The run has not begun within {_CHECKS_S:g} s (process {run.pid}). See {log}.")


def stamp_of(folder: Path) -> tuple[int, int] | None:
    """Return the identity of the settings file, which each start of a run writes last in its preparation."""
    try:
        found = (folder / SETTINGS).stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _tail(output: str) -> list[str]:
    """Return the last lines without those of a table."""
    lines = output.splitlines()[-_TAIL_LINES:]
    table = [number for number, line in enumerate(lines, start=1) if line.startswith(_BORDERS)]
    return lines[max(table, default=0) :]
