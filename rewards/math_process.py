"""One process that compares answers for `math_answer`: a JSON line in, `true` or `false` out.

The kernel ends it when one comparison takes too much processor time, also inside a calculation of Python's own, which
no alarm interrupts. Processor time, not time: a busy machine makes no answer wrong.
"""

import json
import logging
import math
import resource
import sys
from collections.abc import Sequence

_CPU_S = 5
_MEMORY_BYTES = 4 << 30
# Of an answer as long as this no expression is read: parsers take time with the square of it.
_MAX_CHARACTERS = 20_000


def main() -> None:
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that time is not limited; here it is
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    replies, sys.stdout = sys.stdout, sys.stderr
    is_equal("1", ["1"])  # imports what comparing needs
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        _limit_time()
        print(json.dumps(is_equal(asked["answer"], asked["targets"])), file=replies, flush=True)


def is_equal(answer: str, targets: Sequence[str]) -> bool:
    """Return whether the expression in answer equals one of the targets. No expression in it: False."""
    from math_verify import parse, verify

    found = parse(answer[-_MAX_CHARACTERS:], parsing_timeout=None)
    return any(
        verify(parse(_as_expression(target), parsing_timeout=None), found, timeout_seconds=None) for target in targets
    )


def _as_expression(target: str) -> str:
    """Return a target so that all of it is read as one expression; what stands behind `####` where gsm8k's does."""
    target = target.rpartition("####")[2].strip()
    return target if "\\boxed" in target or "$" in target else f"\\boxed{{{target}}}"


def _limit_time() -> None:
    """Let the kernel end this process when it has used _CPU_S more seconds of processor time than by now."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used.ru_utime + used.ru_stime) + _CPU_S, hard))


if __name__ == "__main__":
    main()
