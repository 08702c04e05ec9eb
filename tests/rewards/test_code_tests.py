"""Programs of responses against the tests of labels, in each form that data sets have them."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import OperatorError
from protocol.sandbox.run import ProgramResult, Sandbox
from rewards.code_tests import Case, CodeScorer, cases_of
from rewards.sample import SampleError, Score, make_sample

SQUARE = "def square(x):\n    return x * x"
READS = "print(int(input()) ** 2)"


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    sandbox = Sandbox(4)
    try:
        await sandbox.check()
    except OperatorError as error:
        pytest.skip(str(error))
    yield sandbox
    sandbox.close()


async def _scored(sandbox: Sandbox, code: str, label: Any, test_timeout_s: float = 30.0) -> Score:
    scorer = CodeScorer(sandbox, test_timeout_s, max_fresh=4)
    (score,) = await scorer.score([make_sample(f"Q\nHere:\n```python\n{code}\n```\nDone.", "Q\n", label)])
    return score


LABELS: dict[str, tuple[str, Any]] = {
    "inputs and outputs": (READS, {"inputs": ["3\n", "4\n"], "outputs": ["9\n", "16"]}),
    "the same as text": (READS, json.dumps({"inputs": ["3\n"], "outputs": ["9\n"]})),
    "a program that reads files": (
        "import sys\na = open('/dev/stdin').read()\nb = sys.stdin.readlines()\nsys.stdin.seek(0)\n"
        "c = sys.stdin.buffer.read()\nsys.stdin.seek(0)\nassert [a] == b == [c.decode()]\n"
        "print(int(open(0).read()) ** 2)",
        {"inputs": ["3\n"], "outputs": ["9\n"]},
    ),
    "a ground truth": (READS, {"style": "rule", "ground_truth": json.dumps({"inputs": ["3"], "outputs": ["9"]})}),
    "a function": (SQUARE, {"inputs": [[3], [4]], "outputs": [9, 16], "fn_name": "square"}),
    "values in lists": (SQUARE, {"inputs": [[3], [4]], "outputs": [[9], [16]], "fn_name": "square"}),
    "lines of JSON": (SQUARE, {"inputs": ["3", "4"], "outputs": ["9", "16"], "fn_name": "square"}),
    "a value that is text": (
        "def square(x):\n    return str(x * x)",
        {"inputs": [[3]], "outputs": ["9"], "fn_name": "square"},
    ),
    "a method": (
        "class Solution:\n    def square(self, x):\n        return x * x",
        {"inputs": [[3]], "outputs": [9], "fn_name": "square"},
    ),
    "asserts": (SQUARE, ["assert square(3) == 9", "assert square(-1) == 1"]),
    "asserts as tests": (SQUARE, {"tests": ["assert square(3) == 9"]}),
    "one text": (SQUARE, "assert square(3) == 9\nassert square(4) == 16"),
    "HumanEval": (SQUARE, {"test": "def check(candidate):\n    assert candidate(3) == 9", "entry_point": "square"}),
}


@pytest.mark.parametrize("form", LABELS)
async def test_right_program_passes_each_form_of_tests_and_a_wrong_one_none(sandbox: Sandbox, form: str) -> None:
    code, label = LABELS[form]
    wrong = code.replace("x * x", "x + 1000").replace("** 2", "+ 1000")
    right, failed = await asyncio.gather(_scored(sandbox, code, label), _scored(sandbox, wrong, label))
    assert (right.reward, right.score) == (1.0, 1.0)
    assert (failed.reward, failed.score) == (0.0, 0.0)


async def test_share_of_passed_tests_is_the_score(sandbox: Sandbox) -> None:
    label = ["assert square(1) == 1", "assert square(2) == 4", "assert square(3) == 9", "assert square(0) == 0"]
    score = await _scored(sandbox, "def square(x):\n    return x", label)
    assert (score.reward, score.score) == (0.0, 0.5)


@pytest.mark.parametrize(
    "code",
    [
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "print('passed')\nraise SystemExit",
        "def square(x:",
        "class Anything:\n    __eq__ = lambda self, other: True\nsquare = lambda x: Anything()\nraise SystemExit",
    ],
)
async def test_code_that_does_not_finish_the_test_fails(sandbox: Sandbox, code: str) -> None:
    score = await _scored(sandbox, code, ["assert square(3) == 9"])
    assert score.reward == 0.0


CHEATS = {
    "equals anything": "class A:\n    __eq__ = lambda self, other: True\nsquare = lambda x: A()",
    "is as near as wanted": """
class A:
    __sub__ = __rsub__ = __abs__ = lambda self, *other: self
    __lt__ = __le__ = __gt__ = __ge__ = lambda self, other: True
square = lambda x: A()
""",
    "operators that give what is wanted": """
class A:
    __eq__ = lambda self, other: True
    __sub__ = __rsub__ = __xor__ = lambda self, other: A()
    __abs__ = lambda self: 0.0
    __len__ = lambda self: 0
square = lambda x: A()
""",
    "reads the test": """
import glob, os, re
def square(x):
    for path in [*glob.glob('/work/*'), *glob.glob('/proc/[0-9]*/cmdline'), *glob.glob('/proc/[0-9]*/environ')]:
        try:
            if found := re.search(r'== (\\d+)', open(path).read()):
                return int(found[1])
        except Exception:
            pass
""",
    "reads the judge's memory": """
import os
def square(x):
    with open(f'/proc/{os.getppid()}/mem', 'rb') as memory:
        memory.seek(0x400000)
        memory.read(1)
    return x * x
""",
    "speaks for the judge": """
import os
def square(x):
    with open(f'/proc/{os.getppid()}/fd/1', 'w') as out:
        out.write('passed')
    return x * x
""",
    "other meanings of words": """
import builtins
builtins.AssertionError = builtins.abs = builtins.all = lambda *x: 0
abs = len = all = lambda *x: 0
square = lambda x: -1
""",
    "speaks for the worker": """
import sys
pipe = sys._getframe(2).f_locals['judge']
pipe.send({'names': {'__builtins__': ['dict', [[['same', 'abs'], ['remote', 0]]]], 'square': ['remote', 0]}})
while (request := pipe.receive()) is not None:
    pipe.send({'value': ['same', 0], 'arguments': request['arguments'][0]})
""",
    "ends the judge": "import os, signal\ndef square(x):\n    os.kill(os.getppid(), signal.SIGTERM)",
    "ends itself": "import os\ndef square(x):\n    os._exit(0)",
}


@pytest.mark.parametrize("way", CHEATS)
async def test_code_passes_by_its_values_only(sandbox: Sandbox, way: str) -> None:
    label = ["assert square(3) == 9", "assert abs(square(2.5) - 6.25) < 1e-6", "assert all([not square(1) ^ {1}])"]
    score = await _scored(sandbox, CHEATS[way], label)
    assert (score.reward, score.score) == (0.0, 0.0)


_ROW = re.compile(r"#### (.*): (.*)\n((?s:.*?))\n#~ (.*?) ~> (.*)\n((?s:.*?))\n\n")


async def test_right_program_gets_no_0_and_a_wrong_one_no_1(sandbox: Sandbox) -> None:
    rows = _ROW.findall(Path(__file__).with_name("code_programs.txt").read_text() + "\n\n")
    codes = [(code, code.replace(old, new), test) for _, _, code, old, new, test in rows]
    tests = [json.loads(test) if test[0] == "{" else [test] for *_, test in codes]
    scores = await asyncio.gather(
        *(_scored(sandbox, code, test) for row, test in zip(codes, tests, strict=True) for code in row[:2]),
        return_exceptions=True,
    )
    verdicts = ["refused" if isinstance(each, SampleError) else getattr(each, "reward", each) for each in scores]
    expected = {"judged": (1.0, 0.0), "refused": ("refused", 0.0), "refused always": ("refused", "refused")}
    found = dict(zip([row[0] for row in rows], zip(verdicts[::2], verdicts[1::2], strict=True), strict=True))
    assert found == {about: expected[verdict] for about, verdict, *_ in rows}


async def test_test_that_calls_the_code_too_often_is_refused(sandbox: Sandbox) -> None:
    code, test = "f = lambda x: x", "for i in range(10**6): assert f(i) == i"
    with pytest.raises(SampleError, match="uses the code too often for its time limit"):
        await _scored(sandbox, code, [test], test_timeout_s=2.0)


# Code that defines built-ins, and tests that want the language's or the code's.
ABS = "abs = sorted = lambda *x: 0\n"
MEANT: dict[str, tuple[str, Any, float]] = {
    "subject of the test": ("def sum(x):\n    return 7", ["assert sum([1]) == 7 and not sum(0) != 7"], 1.0),
    "helper of each test": (f"{ABS}f = lambda x: 9", ["assert abs(f(1)) == 0", "assert abs(f(2)) < 1e-6"], 0.0),
    "helper of one test": (
        f"{ABS}def sum(a, b): return 9", ["assert sum(1, 2) == 3", "assert abs(sum(1, 2) - 3) < 1"], 0.0
    ),
    "subject of each test": (
        f"{ABS}def sum(a, b): return a + b", ["assert sum(1, 2) == 3", "assert abs(-sum(1, 2)) == 3"], 1.0
    ),
    "star of the code": (f"{ABS}f = lambda x: 9", "from solution import *\nassert abs(f(1)) == 0", 0.0),
    "named function": ("def sum(a, b): return a + b", {"inputs": [[1, 2]], "outputs": [3], "fn_name": "sum"}, 1.0),
    "arguments by name": (SQUARE, {"inputs": [{"x": 3}], "outputs": [9], "fn_name": "square"}, 1.0),
    "entry point": (
        "def sum(a, b): return 7",
        {"test": "def check(candidate):\n    assert candidate(1, 2) == 7 and sum([1]) == 1", "entry_point": "sum"},
        1.0,
    ),
    "helper of an entry point": (
        f"{ABS}f = lambda x: 9", {"test": "def check(f):\n    assert abs(f(1)) == 0", "entry_point": "f"}, 0.0
    ),
}  # fmt: skip


@pytest.mark.parametrize("use", MEANT)
async def test_built_in_of_a_test_is_the_codes_only_where_the_tests_are_about_it(sandbox: Sandbox, use: str) -> None:
    code, label, reward = MEANT[use]
    assert (await _scored(sandbox, code, label)).reward == reward


@pytest.mark.parametrize(
    ("wanted", "printed", "is_right"),
    [("0.5", "0.50", True), ("1.3333333", "1.33333334", True), ("0.5", "0.51", False), ("v1.10.2", "v1.1.2", False),
     ("9", "9.0", True), ("9", "9.0000001", False), ("1000000007", "1000000006.0", False), ("1e-07", "0.0000001", True),
     ("three", "treeh", False), ("1 2\n3", "1 2 3", False), ("1 2", "1  2 \n\n", True),
     ("\nYES\nNO\n", "YES\nNO", True), ("YES", "\nYES", True), ("1\n2", "1\n\n2", False)],
)  # fmt: skip
async def test_decimal_fractions_are_compared_by_value(
    sandbox: Sandbox, wanted: str, printed: str, is_right: bool
) -> None:
    score = await _scored(sandbox, f"print({printed!r})", {"inputs": [""], "outputs": [wanted]})
    assert score.reward == float(is_right)


@pytest.mark.parametrize(
    ("code", "test"),
    [
        ("class V:\n    def __init__(self, x): self.x = x\n    __eq__ = lambda s, o: True", "assert V(1) == V(2)"),
        ("class I(int):\n    __eq__ = lambda s, o: True\nf = lambda x: I(1)", "assert f(1) == 2"),
        ("class A:\n    __sub__ = __abs__ = lambda s, *o: s\n    __lt__ = lambda s, o: True\nf = lambda x: A()",
         "assert abs(f(1) - 2) < 1e-6"),
        ("class A:\n    __contains__ = lambda s, o: True\nf = lambda x: A()", "assert 5 in f(1)"),
        ("import os, sys\n'together' in sys.argv and os._exit(77)\nf = lambda x: 1", "assert f(1) == 2"),
    ],
)  # fmt: skip
async def test_code_that_passes_whatever_is_tested_is_wrong(sandbox: Sandbox, code: str, test: str) -> None:
    assert (await _scored(sandbox, code, [test])).reward == 0.0


@pytest.mark.parametrize("given", ["lambda x: x", "check", "object()"])
async def test_test_that_no_code_can_pass_is_refused(sandbox: Sandbox, given: str) -> None:
    test = f"def check(): pass\ntry:\n    f({given})\nexcept TypeError:\n    assert False"
    with pytest.raises(
        SampleError, match=r"^\$\.labels\[0\] has a test that cannot be judged: it passes <.*plain values"
    ):
        await _scored(sandbox, "f = lambda x: 1", test)


async def test_helper_that_neither_test_nor_code_defines_is_named(sandbox: Sandbox) -> None:
    label = {"test": "def check(candidate):\n    assert candidate(list_node([1]))", "entry_point": "f"}
    with pytest.raises(SampleError, match="uses list_node, which neither it nor the code defines"):
        await _scored(sandbox, "f = lambda x: x", label)
    assert (await _scored(sandbox, "g = lambda x: x", label)).reward == 0.0


BAD = {
    "loop": "while True: pass",
    "loop of a called function": "def square(x):\n    while True: pass",
    "sleep": "import time\ntime.sleep(600)",
    "flood of both streams": "import sys\nwhile True:\n    print('x' * 999)\n    print('x' * 999, file=sys.stderr)",
}


@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize("form", ["asserts", "inputs"])
async def test_program_over_a_limit_is_wrong_after_one_limit_however_many_tests_it_has(
    sandbox: Sandbox, what: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    run = sandbox.run

    async def counted(program: str, *others: Any) -> ProgramResult:
        started.append(program)
        return await run(program, *others)

    monkeypatch.setattr(sandbox, "run", counted)
    tests = ["assert square(3) == 9"] * 20
    label = tests if form == "asserts" else {"inputs": ["3"] * 20, "outputs": ["9"] * 20}
    score = await _scored(sandbox, BAD[what], label, test_timeout_s=1.0)
    assert (score.reward, score.score) == (0.0, 0.0)
    is_wrong_by_output = (what, form) == ("loop of a called function", "inputs")  # nothing calls it
    assert len(started) == (20 if is_wrong_by_output else 1)


async def test_expected_output_may_be_longer_than_the_usual_limit(sandbox: Sandbox) -> None:
    size = 200_000
    printed = await _scored(sandbox, f"print('7 ' * {size})", {"inputs": [""], "outputs": ["7 " * size]})
    label = {"inputs": [[size]], "outputs": [[7] * size], "fn_name": "f"}
    returned = await _scored(sandbox, "def f(n):\n    return [7] * n", label)
    assert (printed.reward, returned.reward) == (1.0, 1.0)


async def test_response_without_code_is_wrong(sandbox: Sandbox) -> None:
    (score,) = await CodeScorer(sandbox, 10.0, 4).score([make_sample("Q\nIt is nine.", "Q\n", ["assert True"])])
    assert (score.reward, score.logs) == (0.0, {"has_code": 0.0})


@pytest.mark.parametrize(
    ("code", "label"),
    [
        ("class Solution:\n    def f(self, a: List[int]): return a",
         {"inputs": [[[1]]], "outputs": [[1]], "fn_name": "f"}),
        ("queue = deque(input().split())\nprint(math.floor(sqrt(float(queue.pop()))))\nexit()",
         {"inputs": ["4"], "outputs": ["2"]}),
        ("from __future__ import annotations\ndef f(a: List[int]): return a", ["assert f([1]) == [1]"]),
        ("def cache(): return 1\ndef f(): return cache()", ["assert f() == 1"]),
    ],
)  # fmt: skip
async def test_code_needs_no_import_of_names_that_judges_import(sandbox: Sandbox, code: str, label: Any) -> None:
    assert (await _scored(sandbox, code, label)).reward == 1.0


def test_lines_of_a_label_may_be_a_list() -> None:
    assert cases_of({"inputs": [["3", 4]], "outputs": [["9"]]}, 0) == [Case("3\n4", prints="9")]


@pytest.mark.parametrize(
    "label",
    [
        None,
        "",
        7,
        [],
        {"inputs": ["1"], "outputs": []},
        {"a": 1},
        "{broken",
        [1],
        {"inputs": ["{"], "outputs": ["1"], "fn_name": "f"},
        "assert f(1) ==",
        "import numpy\nassert f(1)",
        "METADATA = {}\ndef check(candidate):\n    assert candidate(1)",
        {"inputs": [5], "outputs": [5], "fn_name": "f"},
        "import unittest\nclass TestF(unittest.TestCase):\n    def test_f(self):\n        assert f(1)",
        "x = int('3')\nclass TestF:\n    def test_f(self):\n        assert f(1)",
        "def check_f():\n    assert f(1)\nif __name__ == '__main__':\n    check_f()",
        "async def test_f():\n    assert f(1)",
        "x = 3",
        "assert abs(sum([1]) - 1) < 1",
        {"test": "assert f(1)", "entry_point": "f"},
    ],
)
def test_label_without_usable_tests_is_refused(label: Any) -> None:
    with pytest.raises(SampleError):
        cases_of(label, 0)
