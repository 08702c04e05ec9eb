"""Commands of ours in copies of a process that has imported what most of them import: those seconds are paid once.

A copy is `python -m MODULE ARGUMENTS` in all else: a process of its own, with its own output, environment and exit
code. It is forked from multiprocessing's fork server, which computed nothing.
"""

import atexit
import contextlib
import multiprocessing
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(["tests.fakes.warm_imports"])


class WarmCommand:
    """A command that has begun. As of subprocess.Popen: communicate, kill, returncode."""

    def __init__(self, module: str, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        """environment: changes to that of this process."""
        self._folder = Path(tempfile.mkdtemp(prefix="sluice-warm"))
        self.args = [module, *arguments]
        environment = {"OMP_NUM_THREADS": "1", **os.environ, **(environment or {})}
        self._process = _server.Process(target=_be, args=(str(self._folder), self.args, environment))
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def communicate(self, timeout: float = 240.0) -> tuple[str, str]:
        """Return its standard output and standard error, once it has ended. Raises: subprocess.TimeoutExpired.

        Either way nothing of it is left: what it started ends with it.
        """
        try:
            self._process.join(timeout)
            output, errors = ((self._folder / name).read_text(errors="replace") for name in ("output", "errors"))
            if self._process.exitcode is None:
                raise subprocess.TimeoutExpired(self.args, timeout, output, errors)
            return output, errors
        finally:
            self.kill()

    def kill(self) -> None:
        """End it and what it started; returns when it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.kill()  # one that has no group of its own yet
        self._process.join()
        shutil.rmtree(self._folder, ignore_errors=True)


def run_warm(
    module: str, *arguments: str, timeout: float = 240.0, environment: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Return the finished command. Raises: subprocess.TimeoutExpired, once it was ended."""
    command = WarmCommand(module, *arguments, environment=environment)
    output, errors = command.communicate(timeout)
    assert command.returncode is not None
    return subprocess.CompletedProcess(command.args, command.returncode, output, errors)


def _be(folder: str, command: list[str], environment: dict[str, str]) -> None:
    """Be `python -m COMMAND` from here on."""
    os.setsid()
    for descriptor, path in ((0, os.devnull), (1, f"{folder}/output"), (2, f"{folder}/errors")):
        opened = os.open(path, os.O_RDONLY if descriptor == 0 else os.O_WRONLY | os.O_CREAT)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(_ROOT)
    sys.argv = command
    try:
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # a process of multiprocessing ends without
