"""The process that proves checkpoints: requests are lines on standard input, verdicts lines on standard output.

What a proof imports takes longer than most proofs. So it is imported once, and each checkpoint is proven by a fresh
copy of this process, which begins with that and nothing else. It has one thread and no GPU, and ends with whoever asks:
a signal to all processes of a terminal or of a job, which the asker gets too, does not end it.
"""

import contextlib
import os
import resource
import select
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import IO, NoReturn

import msgspec

from learner.checkpoint.proof import Proof
from learner.rank.proof.not_made import how_it_ended, not_made
from learner.rank.proof.request import ProofRequest

_OOM_SCORE = Path("/proc/self/oom_score_adj")


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # Where memory is short the kernel ends this process, and not the rank beside it, which is larger.
    with contextlib.suppress(OSError):
        _OOM_SCORE.write_text("1000", encoding="ascii")
    # What libraries print is not the verdict.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    cpu_told = 0.0
    while line := sys.stdin.buffer.readline():
        started = time.monotonic()
        request = msgspec.json.decode(line, type=ProofRequest)
        _import_models()
        cpu_s = _own_cpu_s()
        found = _from_a_copy(request, answers, time.monotonic() - started, cpu_s - cpu_told)
        cpu_told = cpu_s
        # One line for each request, whatever becomes of its copy: a second one would answer the next request.
        answers.write(msgspec.json.encode(found) + b"\n")
        answers.flush()


def _import_models() -> None:
    """Import what every proof needs; the second time it is there."""
    import transformers.masking_utils
    import transformers.modeling_utils  # noqa: F401

    import learner.rank.proof.verdict  # noqa: F401


def _from_a_copy(request: ProofRequest, answers: IO[bytes], seconds: float, cpu_s: float) -> Proof:
    """Return what a copy of this process finds. seconds, cpu_s: spent on it before the copy began."""
    started = time.monotonic()
    reading, writing = os.pipe()
    copy = os.fork()
    if copy == 0:
        os.close(answers.fileno())
        os.close(reading)
        _prove(request, writing, seconds, cpu_s)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        said = file.read()
    status = os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1])
    if status != 0:
        return not_made(request, f"its process {how_it_ended(status)}", seconds + time.monotonic() - started)
    return msgspec.json.decode(said, type=Proof)


def _prove(request: ProofRequest, writing: int, seconds: float, cpu_s: float) -> NoReturn:
    """Write the verdict, in a copy that ends here."""
    threading.Thread(target=_end_with_the_asker, name="asker", daemon=True).start()
    from learner.rank.proof.verdict import verdict

    try:
        found = verdict(request)
    except Exception as error:  # whatever it is, nothing is shown
        traceback.print_exc()
        why = " ".join(f"{type(error).__name__}: {error}".split())
        found = not_made(request, f"its process failed: {why}", 0.0)
    spent = {"seconds": found.seconds + seconds, "cpu_s": found.cpu_s + cpu_s}
    with os.fdopen(writing, "wb") as file:
        file.write(msgspec.json.encode(msgspec.structs.replace(found, **spent)))
    os._exit(0)


def _own_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _end_with_the_asker() -> None:
    """End when standard input does. Nothing is read from it: the next request is for the process that goes on."""
    watched = select.poll()
    watched.register(0, 0)
    watched.poll()
    os._exit(1)


if __name__ == "__main__":
    main()
