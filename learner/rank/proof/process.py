"""One proof in a fresh process, started, asked for, and ended. Imports no torch."""

import contextlib
import os
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

from learner.checkpoint.proof import Proof, manifest_hash
from learner.rank.proof.request import ProofRequest
from protocol.failpoints import VARIABLE

_ROOT = Path(__file__).resolve().parents[3]
_POLL_S = 0.1
_TAIL = 300
_IDLE = 19
# The proof takes no device and one core; what would tell torch otherwise does not reach it.
_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}


def prove_in_a_process(
    request: ProofRequest,
    limit_s: float,
    is_given_up: Callable[[], bool] = lambda: False,
    is_awaited: Callable[[], bool] = lambda: True,
) -> Proof | None:
    """Return the verdict of a fresh process on a checkpoint; None when it was given up.

    is_awaited: whether nothing goes on until the verdict is there: the process then computes like any other. Until then
    it takes what others leave, at nice 19. Blocks at most limit_s; the process is gone when this returns. One that
    cannot be started, ends without a verdict, or has none in time, shows nothing: the verdict is then "not made", with
    the reason.
    """
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        try:
            errors = stack.enter_context(tempfile.TemporaryFile())
            process = _start(errors)
        except OSError as error:  # no memory, no more processes, no room for what it says
            return _not_made(request, f"its process could not be started: {error.strerror}", started)
        is_hurried = False
        os.setpriority(os.PRIO_PROCESS, process.pid, _IDLE)
        # In a thread: a pipe takes 64 KiB, and a process that stands still takes nothing from it.
        asking = threading.Thread(target=_ask, args=(process, request), name="ask for a proof", daemon=True)
        asking.start()
        try:
            while process.poll() is None:
                if not is_hurried and (is_hurried := is_awaited()):
                    _hurry(process.pid)
                if is_given_up():
                    return None
                if time.monotonic() - started > limit_s:
                    return _not_made(
                        request, f"it had no verdict within {limit_s:g} s (learner.proof_timeout_s)", started
                    )
                time.sleep(_POLL_S)
            return _answer(request, process, errors, started)
        finally:
            process.kill()
            process.wait()
            asking.join()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(BrokenPipeError):
                    if pipe is not None:
                        pipe.close()


def _start(errors: IO[bytes]) -> "subprocess.Popen[bytes]":
    # Our own interpreter and module. -P: the folder that it is started in may hold modules of the same names. A group
    # of its own: Ctrl-C in a terminal goes to the whole group of the command, which decides by itself what ends.
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "learner.rank.proof"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        env=_environment(),
        process_group=0,
    )


def _ask(process: "subprocess.Popen[bytes]", request: ProofRequest) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended already, and its status says how
        process.stdin.write(msgspec.json.encode(request) + b"\n")
        process.stdin.flush()


def _hurry(pid: int) -> None:
    with contextlib.suppress(PermissionError):  # not everyone may; it then takes longer where others compute
        os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, 0))


def _answer(
    request: ProofRequest,
    process: "subprocess.Popen[bytes]",
    errors: IO[bytes],
    started: float,
) -> Proof:
    assert process.stdout is not None
    try:
        return msgspec.json.decode(process.stdout.read(), type=Proof)
    except msgspec.DecodeError:
        errors.seek(0)
        last = errors.read().decode(errors="replace").strip()[-_TAIL:].splitlines()
        status = process.returncode
        how = f"ended with status {status}" if status >= 0 else f"was ended by {signal.Signals(-status).name}"
        how += ", as for a lack of memory" if status == -signal.SIGKILL else ""
        return _not_made(request, f"its process {how}{f': {last[-1]}' if last else ''}", started)


def _not_made(request: ProofRequest, problem: str, started: float) -> Proof:
    return Proof(
        verdict="not made",
        problem=problem,
        step=request.told.step,
        seconds=time.monotonic() - started,
        manifest=manifest_hash(Path(request.folder)),
    )


def _environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    kept = {name: value for name, value in os.environ.items() if name != VARIABLE}
    return {**kept, **_ENVIRONMENT, "PYTHONPATH": path}
