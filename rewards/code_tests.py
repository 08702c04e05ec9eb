"""The bundled code scorer: 1 if the response's code passes all tests of the label in the sandbox, else 0.

The code is the last block fenced as Python, else the last block without a language. A label is one of these values,
its JSON text, or an object with it as `ground_truth`:

    {"inputs": [text, ..], "outputs": [text, ..]}                        the program reads and prints; or [line, ..]
    {"inputs": [[argument, ..], ..], "outputs": [value, ..], "fn_name"}  a function, or a method of its class Solution
    ["assert f(1) == 2", ..], one text, or {"tests": ..}                 statements after the code
    {"test": "def check(candidate): ..", "entry_point": "f"}             HumanEval's form

Names that judges of such tests import before the code are there too, such as List, deque and math.
Code and test run in different processes (`code_judge`): statements use the functions, classes and objects of the code.
Functions test_.. without a call are called; the code may be imported as `solution`. A test that passes functions or
objects of its own to the code, or that needs one process with the code, is refused.
"""

import asyncio
import dataclasses
import itertools
import json
import math
import re
import secrets
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

from protocol.errors import NeighbourError, OperatorError
from protocol.sandbox.run import Limits, ProgramResult, Sandbox
from rewards.code_judge import UNFIT
from rewards.code_names import TestNames, check_runs, names_in
from rewards.sample import Sample, SampleError, Score, ScorerFailure

# At the start of a line options may follow the language, such as "python title=x" or "python {linenos}".
# Possessive: a run of blanks behind a fence costs its length, not its square.
_BLOCK = re.compile(
    r"(^[-*+>\d.) \t]*+)?+(?<![`~])(`{3,}+|~{3,}+)([ \t]*+[\w+#.-]*+[ \t]*+"
    r"(?(1)(?:[^\s=:`{]*(?:[={]|:(?=\S))[^\n`]*+)?))\n(.*?)\2",
    re.DOTALL | re.MULTILINE,
)
_PYTHON = ("python", "python3", "py", "py3")
_FRACTION = frozenset(".eE")  # 0.5, 1e-07
_MAX_TESTS = 256
_FRESH_S = 0.5
_WALL_PER_CPU = 3.0
# Judges of APPS, TACO and LiveCodeBench import these before the code, and the interpreter of the sandbox has no exit().
_USUAL = {
    "typing": "Any Callable Dict Iterable List Optional Set Tuple Union",
    "collections": "Counter OrderedDict defaultdict deque",
    "functools": "cache cmp_to_key lru_cache reduce",
    "itertools": "accumulate chain combinations permutations product",
    "heapq": "heapify heappop heappush heapreplace nlargest nsmallest",
    "bisect": "bisect_left bisect_right insort",
    "math": "ceil comb factorial floor gcd inf sqrt",
    "sys": "exit",
}
_USUAL_MODULES = (*_USUAL, "datetime", "random", "re", "string")
_JUDGE = "import sys, types\nsys.modules['rewards'] = types.ModuleType('rewards')\n"
for _name in ("rewards.code_proxies", "rewards.code_judge"):
    _JUDGE += f"module = sys.modules[{_name!r}] = types.ModuleType({_name!r})\n"
    _JUDGE += f"exec({Path(__file__).with_name(_name.rpartition('.')[2] + '.py').read_text()!r}, vars(module))\n"
_JUDGE += "module.start()"


@dataclass(frozen=True)
class Case:
    """One test."""

    stdin: str = ""
    prints: str | None = None  # expected output; None: the output is not compared
    statements: str = ""  # statements that must run without an error
    entry: str | None = None  # the statements' function `check` is called with the value of this expression
    names: TestNames = field(default_factory=TestNames)
    call: tuple[str, list[Any] | dict[str, Any]] | None = None  # (function, or method of Solution; arguments)
    value: Any = None  # expected result of the call, as JSON


class CodeScorer:
    """Runs the tests of programs in a sandbox; a Scorer by its method `score`.

    A program's first test runs alone, the others together. A test that exceeds a limit ends them: an endless loop costs
    one time limit, not one per test. A program counts against max_fresh for its first half second only; then the
    sandbox lowers its priority. So endless loops delay no sound program.
    """

    def __init__(self, sandbox: Sandbox, test_timeout_s: float, max_fresh: int) -> None:
        """test_timeout_s: limit of processor time; of wall time without waiting for a processor three times as much."""
        self._sandbox = sandbox
        self._limits = Limits(
            _WALL_PER_CPU * test_timeout_s, cpu_s=math.ceil(test_timeout_s), lower_priority_after_s=_FRESH_S
        )
        self._fresh = asyncio.Semaphore(max_fresh)

    async def score(self, samples: Sequence[Sample]) -> list[Score]:
        """Return 1.0 or 0.0 per sample, with the share of passed tests as score.

        Raises: SampleError without tests, ScorerFailure if the machine is too full to run a program.
        """
        tests = [cases_of(sample.label, index) for index, sample in enumerate(samples)]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._score_one(index, *each))
                    for index, each in enumerate(zip(samples, tests, strict=True))
                ]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _score_one(self, index: int, sample: Sample, cases: Sequence[Case]) -> Score:
        code = code_of(sample.text)
        if code is None:
            return Score(0.0, 0.0, {"has_code": 0.0})
        try:
            outcomes = await self._outcomes(with_usual_names(code), cases)
        except (NeighbourError, OperatorError, OSError) as error:
            raise ScorerFailure(index, "Sandbox", str(error)) from None
        num_passed = outcomes.count("passed")
        unfit = [each for each in outcomes if each.startswith(UNFIT)]
        if unfit and num_passed + len(unfit) == len(cases):
            raise SampleError(index, f"has a test that cannot be judged: {unfit[0].removeprefix(UNFIT)}")
        logs = {"has_code": 1.0, "over_limit": float("limit" in outcomes)}
        return Score(float(num_passed == len(cases)), num_passed / (len(cases) - len(unfit)), logs)

    async def _outcomes(self, code: str, cases: Sequence[Case]) -> list[str]:
        """Return the outcomes of the cases, up to the first one over a limit."""
        outcomes: list[str] = [await self._outcome(code, cases[0])]
        if outcomes[0] != "limit":
            tests = [asyncio.ensure_future(self._outcome(code, case)) for case in cases[1:]]
            try:
                for test in asyncio.as_completed(tests):
                    outcomes.append(await test)
                    if outcomes[-1] == "limit":
                        break
            finally:
                for each in tests:
                    each.cancel()
                await asyncio.gather(*tests, return_exceptions=True)
        return outcomes

    async def _outcome(self, code: str, case: Case) -> str:
        """Return "passed", "failed", "limit", or UNFIT and why the test is not for this judge."""
        if case.prints is not None:
            result = await self._run(code, case.stdin.encode(errors="replace"), case.prints)
            is_passed = _is_output(result.output, case.prints)
        else:
            mark = secrets.token_hex(16)
            task = {"code": code, "test": case.statements, "call": case.call, "value": case.value, "mark": mark,
                    "entry": case.entry, "own": [*case.names.own], "modules": case.names.modules}  # fmt: skip
            result = await self._run(_JUDGE, json.dumps(task).encode(), "")
            # The code runs in another process, so this output comes from the judge.
            is_passed = result.output.startswith(mark)
            if result.output.startswith(mark + UNFIT):
                return result.output.removeprefix(mark).strip()
        if result.how != "exit":
            return "limit"
        return "passed" if is_passed and result.exit_code == 0 else "failed"

    async def _run(self, program: str, stdin: bytes, expected: str) -> ProgramResult:
        output_bytes = self._limits.output_bytes + len(expected.encode(errors="replace"))
        limits = dataclasses.replace(self._limits, output_bytes=output_bytes)
        async with self._fresh:
            running = asyncio.ensure_future(self._sandbox.run(program, stdin, limits))
            try:
                await asyncio.wait([running], timeout=_FRESH_S)
            except asyncio.CancelledError:
                running.cancel()
                await asyncio.wait([running])
                raise
        return await running


def code_of(response: str) -> str | None:
    """Return the code of a response, or None. Responses often end with sample output in a block without language."""
    blocks = [
        (re.findall(r"[\w+#-]+", info), code) for *_, info, code in _BLOCK.findall(response.replace("\r\n", "\n"))
    ]
    python = [code for words, code in blocks if words and words[0].lower() in _PYTHON]
    unnamed = [code for words, code in blocks if not words]
    found = next(reversed(python or unnamed), None)
    return None if found is None else textwrap.dedent(found)  # a block in a list is indented


def with_usual_names(code: str) -> str:
    """Return the code after the imports of usual names in it. A name that the code itself binds is its own.

    Example: `List` in the code gives `from typing import List` before it.
    """
    if "from __future__" in code:  # must come first
        return code
    words = set(re.findall(r"\w+", code))
    lines = [f"import {module}" for module in _USUAL_MODULES if module in words]
    for module, names in _USUAL.items():
        if used := [name for name in names.split() if name in words]:
            lines.append(f"from {module} import {', '.join(used)}")
    if "quit" in words:
        lines.append("from sys import exit as quit")
    return "; ".join(lines) + "\n" + code if lines else code


def cases_of(label: Any, index: int) -> list[Case]:
    """Return a label's tests. index: position in the request. Raises: SampleError for a label without tests."""
    found = label
    if isinstance(found, Mapping) and "ground_truth" in found:
        found = found["ground_truth"]
    try:
        if isinstance(found, str) and found.lstrip()[:1] in ("{", "["):
            found = json.loads(found)
        tests = _tests(found["tests"] if isinstance(found, Mapping) and "tests" in found else found)
    except json.JSONDecodeError:
        raise SampleError(index, f"is {found!r:.80}, which contains invalid JSON") from None
    except ValueError as error:
        raise SampleError(index, f"is {found!r:.80}, which {error}") from None
    if not tests or len(tests) > _MAX_TESTS:
        raise SampleError(index, f"is {label!r:.80}, expected inputs and outputs, or 1 to {_MAX_TESTS} tests")
    return tests


def _tests(found: Any) -> list[Case]:
    match found:
        case str() if found.strip():
            return _tests([found])
        case [*statements] if statements and all(isinstance(each, str) for each in statements):
            names = names_in(statements)
            for each in statements:
                check_runs(each)
            return [Case(statements=each, names=names) for each in statements]
        case {"test": str() as test, "entry_point": str() as name}:
            names = dataclasses.replace(names_in([test, "from solution import *"]), own=frozenset())
            if not re.search(r"^def check\(", test, re.MULTILINE):
                raise ValueError("has an entry_point, but its test defines no check(candidate)")
            return [Case(statements=test, entry=name, names=names)]
        case {"inputs": [*inputs], "outputs": [*outputs]} if len(inputs) == len(outputs):
            name = found.get("fn_name")
            if name is not None:
                return [_call(str(name), *each) for each in zip(inputs, outputs, strict=True)]
            return [Case(_lines(stdin), prints=_lines(out)) for stdin, out in zip(inputs, outputs, strict=True)]
    return []


def _lines(given: Any) -> str:
    return "\n".join(map(str, given)) if isinstance(given, list) else str(given)


def _call(name: str, arguments: Any, value: Any) -> Case:
    # Some data sets store the arguments as lines of JSON.
    if isinstance(arguments, str):
        arguments = [json.loads(line) for line in arguments.splitlines() if line.strip()]
    if not isinstance(arguments, list | tuple | dict):
        raise ValueError(f"has the arguments {arguments!r:.80}, expected a list of them, or an object by their names")
    return Case(call=(name, arguments if isinstance(arguments, dict) else list(arguments)), value=value)


def _is_output(printed: str, expected: str) -> bool:
    """Return whether the words of each line are the same; decimal fractions by value, as contests compare them.

    Blank lines at the begin and the end do not count: outputs copied from a contest's page begin with one.
    """
    found, wanted = ([line.split() for line in text.strip().split("\n")] for text in (printed, expected))
    pairs = zip(itertools.chain(*found), itertools.chain(*wanted), strict=False)
    return [*map(len, found)] == [*map(len, wanted)] and all(_is_word(*pair) for pair in pairs)


def _is_word(found: str, wanted: str) -> bool:
    if found == wanted or not _FRACTION.intersection(found + wanted):
        return found == wanted
    try:
        if _FRACTION.intersection(wanted):
            return math.isclose(float(found), float(wanted), rel_tol=1e-6, abs_tol=1e-9)
        return Decimal(found) == Decimal(wanted)  # 9.0 is 9, and 9.0000001 is not
    except (ValueError, ArithmeticError):
        return False
