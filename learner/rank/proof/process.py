"""The process that proves checkpoints: started when it is first asked, ended when it does not answer. No torch here."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import msgspec

from learner.checkpoint.proof import Proof
from learner.rank.proof.not_made import how_it_ended, not_made
from learner.rank.proof.request import ProofRequest
from protocol.failpoints import VARIABLE

_ROOT = Path(__file__).resolve().parents[3]
_POLL_S = 0.1
_TAIL = 300
_IDLE = 19
_END_S = 5.0
# The proof takes no device and one core; what would tell torch otherwise does not reach it.
_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}


def prove_in_a_process(
    request: ProofRequest,
    limit_s: float,
    is_given_up: Callable[[], bool] = lambda: False,
    is_awaited: Callable[[], bool] = lambda: True,
) -> Proof | None:
    """Return what `ProofProcess.prove` does, of a process that has gone when this returns."""
    with contextlib.closing(ProofProcess()) as process:
        return process.prove(request, limit_s, is_given_up, is_awaited)


class ProofProcess:
    """One at most; it stays for the next checkpoint. It ends with this process, whatever ends that."""

    def __init__(self) -> None:
        self._running: _Running | None = None

    def prove(
        self, request: ProofRequest, limit_s: float, is_given_up: Callable[[], bool], is_awaited: Callable[[], bool]
    ) -> Proof | None:
        """Return the verdict on a checkpoint; None when it was given up.

        is_awaited: whether nothing goes on until the verdict is there: the process then computes like any other. Until
        then it takes what others leave, at nice 19. Blocks at most limit_s. A process that cannot be started, ends
        without a verdict, or has none in time, shows nothing: the verdict is then "not made", with the reason.
        """
        started = time.monotonic()
        if self._running is not None and self._running.has_ended:
            self.close()
        try:
            running = self._running = self._running or _Running()
        except OSError as error:  # no memory, no more processes, no room for what it says
            return not_made(request, f"its process could not be started: {error.strerror}", _since(started))
        running.ask(request)
        is_hurried = False
        while not running.has_answered(_POLL_S):
            if not is_hurried and (is_hurried := is_awaited()):
                running.hurry()
            if is_given_up():
                self.close()
                return None
            if _since(started) > limit_s:
                self.close()
                problem = f"it had no verdict within {limit_s:g} s (learner.proof_timeout_s)"
                return not_made(request, problem, _since(started))
        try:
            return running.answer()
        except msgspec.DecodeError:
            self._running = None
            return not_made(request, f"its process {running.end(_END_S)}", _since(started))

    def close(self) -> None:
        """End the process, if there is one, and what it is at."""
        if self._running is not None:
            self._running.end()
        self._running = None


class _Running:
    """The process, with the copy of itself that is at a checkpoint, if there is one: both are of one process group."""

    def __init__(self) -> None:
        """Raises: OSError."""
        with contextlib.ExitStack() as stack:
            self._said: IO[bytes] = stack.enter_context(tempfile.TemporaryFile())
            # Our own interpreter and module. -P: the folder that it is started in may hold modules of the same names. A
            # group of its own: Ctrl-C in a terminal goes to the whole group of the command, which decides what ends.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "learner.rank.proof"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                env=_environment(),
                process_group=0,
            )
            self._files = stack.pop_all()
        self._asking = threading.Thread()

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def ask(self, request: ProofRequest) -> None:
        """Have it prove a checkpoint with what others leave of the processors; returns at once."""
        with contextlib.suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PGRP, self._process.pid, _IDLE)
        # In a thread: a pipe takes 64 KiB, and a process that stands still takes nothing from it.
        self._asking = threading.Thread(target=self._write, args=(request,), name="ask for a proof", daemon=True)
        self._asking.start()

    def has_answered(self, limit_s: float) -> bool:
        """Return whether it said something, or ended, within this time."""
        assert self._process.stdout is not None
        poll = select.poll()  # not select(), which knows no descriptor above 1023
        poll.register(self._process.stdout, select.POLLIN)
        return bool(poll.poll(limit_s * 1000))

    def answer(self) -> Proof:
        """Raises: msgspec.DecodeError when it ended instead."""
        assert self._process.stdout is not None
        found = msgspec.json.decode(self._process.stdout.readline(), type=Proof)
        self._asking.join()
        return found

    def hurry(self) -> None:
        with contextlib.suppress(PermissionError, ProcessLookupError):  # not everyone may: it then takes longer
            os.setpriority(os.PRIO_PGRP, self._process.pid, os.getpriority(os.PRIO_PROCESS, 0))

    def end(self, within_s: float = 0.0) -> str:
        """Return how it ended, and what it said last. within_s: for one that is about to end by itself."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(within_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        status = self._process.wait()
        self._asking.join()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()
        with self._files:
            self._said.seek(0)
            last = self._said.read().decode(errors="replace").strip()[-_TAIL:].splitlines()
        return f"{how_it_ended(status)}{f': {last[-1]}' if last else ''}"

    def _write(self, request: ProofRequest) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already, and its status says how
            self._process.stdin.write(msgspec.json.encode(request) + b"\n")
            self._process.stdin.flush()


def _environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    kept = {name: value for name, value in os.environ.items() if name != VARIABLE}
    return {**kept, **_ENVIRONMENT, "PYTHONPATH": path}


def _since(started: float) -> float:
    return time.monotonic() - started
