"""A process that compares answers for `math_answer`.

It reads lines of JSON, `{"answers": [TEXT], "targets": [TEXT]}`, and replies with whether one equals a target.

The kernel kills it when a comparison exceeds its processor time, even inside a calculation that no alarm interrupts.
The limit is processor time, so a busy machine makes no answer wrong.
"""

import json
import logging
import math
import re
import resource
import sys
from collections.abc import Sequence

_CPU_S = 5
_MEMORY_BYTES = 4 << 30
# Only the last characters are parsed: parsing time grows with the square of the length.
_MAX_CHARACTERS = 20_000
_LONGEST_PRODUCT = 3  # longest product of small letters, such as xyz
_BRACE = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
_DOLLAR = re.compile(r"(?<!\\)\$")  # begins a formula; `\\$` is money


def main() -> None:
    """Print `"ready"` once the libraries are imported, then a reply to each line until standard input ends."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns about missing time limits; this process has one
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    replies, sys.stdout = sys.stdout, sys.stderr
    is_equal("1", ["1"])  # imports the libraries
    print(json.dumps("ready"), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        _limit_time()
        is_right = any(is_equal(answer, request["targets"]) for answer in request["answers"])
        print(json.dumps(is_right), file=replies, flush=True)


def is_equal(answer: str, targets: Sequence[str]) -> bool:
    """Return whether the expression in answer equals one of the targets. An answer without an expression: False."""
    from math_verify import parse, verify

    found = parse(answer[-_MAX_CHARACTERS:], parsing_timeout=None)
    # Of a gsm8k target the part after `####` counts.
    expected = [as_expression(target.rpartition("####")[2]) for target in targets]
    texts = {_letters(each) for each in found if isinstance(each, str)}
    return any(
        verify(parse(each, parsing_timeout=None), found, timeout_seconds=None)
        for each in expected
        if not _is_word(each) or _letters(each) in texts
    )


def _is_word(expression: str) -> bool:
    """Return whether it is a word or letters in order, such as CAB, which math-verify reads as a product C A B."""
    text = expression.removeprefix("\\boxed{").removesuffix("}")
    letters = _letters(text)
    return bool(re.fullmatch(r"[A-Za-z]+([\s,]+[A-Za-z]+)*", text.strip())) and (
        len(letters) > _LONGEST_PRODUCT or (len(letters) > 1 and any(each.isupper() for each in text))
    )


def _letters(text: str) -> str:
    return re.sub(r"\\[A-Za-z]+|[^A-Za-z]", "", text).lower()  # without commands such as \text


def as_expression(text: str) -> str:
    """Return a target, or what an `<answer>` holds, in a form that parses as one expression."""
    # Markdown, and the end of a sentence inside or behind it: **5.** or **5**.
    text = text.strip().removesuffix(".").strip("*`").removesuffix(".")
    return text if "\\boxed" in text or _DOLLAR.search(text) else f"\\boxed{{{text}}}"


def last_box(text: str) -> str:
    """Return the `\\boxed{..}` that closes last, or the text without one: math-verify makes a set of several.

    A blank before its brace and the end of a sentence in it, `\\boxed {5.}`, are left out: math-verify reads neither.
    """
    found, opened = text, list[re.Match[str]]()
    for brace in _BRACE.finditer(text):
        if brace[0].endswith("{") and brace[0] != "\\{":
            opened.append(brace)
        elif brace[0] == "}" and opened and (start := opened.pop())[0] != "{":
            found = f"\\boxed{{{text[start.end() : brace.start()].strip(' ~').rstrip('.,')}}}"
    return found


def _limit_time() -> None:
    """Let the kernel kill this process after _CPU_S more seconds of processor time."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used.ru_utime + used.ru_stime) + _CPU_S, hard))


if __name__ == "__main__":
    main()
