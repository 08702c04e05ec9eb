"""The process that proves one checkpoint: a request on standard input, the verdict as a line on standard output.

It has one thread and no GPU, and ends with whoever asked.
"""

import os
import sys
import threading

import msgspec

from learner.rank.proof.request import ProofRequest


def main() -> None:
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
