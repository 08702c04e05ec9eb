"""Programs of responses against the tests of labels, in each form that data sets have them."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from protocol.errors import OperatorError
from protocol.sandbox.limits import Limits
from protocol.sandbox.run import Sandbox
from rewards.code_tests import cases_of, code_of, make_code_scorer
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


async def _scored(sandbox: Sandbox, code: str, label: Any, wall_s: float = 60.0) -> Score:
    scorer = make_code_scorer(sandbox, Limits(wall_s=wall_s))
    (score,) = await scorer([make_sample(f"Q\nHere:\n```python\n{code}\n```\nDone.", "Q\n", label)])
    return score


LABELS: dict[str, tuple[str, Any]] = {
    "inputs and outputs": (READS, {"inputs": ["3\n", "4\n"], "outputs": ["9\n", "16"]}),
    "the same as text": (READS, json.dumps({"inputs": ["3\n"], "outputs": ["9\n"]})),
    "a ground truth": (READS, {"style": "rule", "ground_truth": json.dumps({"inputs": ["3"], "outputs": ["9"]})}),
    "a function": (SQUARE, {"inputs": [[3], [4]], "outputs": [9, 16], "fn_name": "square"}),
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
        "while True: pass",
    ],
)
async def test_code_that_does_not_reach_the_tests_end_has_not_passed(sandbox: Sandbox, code: str) -> None:
    wall_s = 3.0 if code.startswith("while") else 60.0
    score = await _scored(sandbox, code, ["assert square(3) == 9"], wall_s)
    assert score.reward == 0.0


async def test_response_without_code_is_wrong(sandbox: Sandbox) -> None:
    scorer = make_code_scorer(sandbox, Limits())
    (score,) = await scorer([make_sample("Q\nIt is nine.", "Q\n", ["assert True"])])
    assert (score.reward, score.logs) == (0.0, {"has_code": 0.0})


def test_last_block_is_the_code() -> None:
    assert code_of("```python\na\n```\nNo:\n```py\nb\n```") == "b\n"
    assert code_of("```\nc\n```") == "c\n"
    assert code_of("`d`") is None


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
    ],
)
def test_label_without_tests_is_refused(label: Any) -> None:
    with pytest.raises(SampleError):
        cases_of(label, 0)
