"""The process that proves one checkpoint: a request on standard input, the verdict as a line on standard output.

It has one thread and no GPU, and ends with whoever asked: a signal to all processes of a terminal or of a job, which
the asker gets too, does not end it.
"""

import contextlib
import os
import signal
import sys
import threading
from pathlib import Path

import msgspec

from learner.rank.proof.request import ProofRequest

_OOM_SCORE = Path("/proc/self/oom_score_adj")


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # Where memory is short the kernel ends this process, and not the rank beside it, which is larger.
    with contextlib.suppress(OSError):
        _OOM_SCORE.write_text("1000", encoding="ascii")
    request = msgspec.json.decode(sys.stdin.buffer.readline(), type=ProofRequest)
    threading.Thread(target=_end_with_the_asker, name="asker", daemon=True).start()
    # What libraries print is not the verdict.
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    from learner.rank.proof.verdict import verdict

    answer.write(msgspec.json.encode(verdict(request)) + b"\n")
    answer.flush()
    os._exit(0)


def _end_with_the_asker() -> None:
    """End when standard input does: the asker keeps its other end for as long as it lives and wants to know."""
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    main()
