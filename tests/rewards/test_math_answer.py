"""The scorer of mathematics, in the processes that it really uses."""

import asyncio
from typing import Any

import pytest

from rewards.math_answer import make_math_scorer
from rewards.math_process import as_expression, is_equal
from rewards.sample import SampleError, Score, Scorer, make_sample


@pytest.mark.parametrize(
    ("answer", "target", "expected"),
    [
        ("The total is $72$.", "72", True),
        ("\\boxed{0.5}", "\\frac{1}{2}", True),
        ("first 3, so \\boxed{x^2+1}", "1 + x^2", True),
        ("\\boxed{\\{2,1\\}}", "\\{1,2\\}", True),
        ("= 1000", "1,000", True),
        ("72", "They had 36 each.\n#### 72", True),
        ("\\boxed{73}", "72", False),
        ("\\boxed{72} or \\boxed{73}", "72", False),
        ("\\boxed{silent}", "listen", False),
        ("\\boxed{Listen}", "listen", True),
        ("\\boxed{\\text{Yes}}", "Yes", True),
        ("\\boxed{\\textbf{No Solution}}", "no solution", True),
        ("\\boxed{\\text{No}}", "Yes", False),
        ("\\boxed{THH}", "HHT", False),
        ("\\boxed{\\text{THH}}", "HHT", False),
        ("\\boxed{C, A}", "A, C", False),
        ("\\boxed{yx}", "xy", True),
        ("I do not know", "72", False),
        ("", "72", False),
    ],
)
def test_answer_equals_a_target_as_an_expression(answer: str, target: str, expected: bool) -> None:
    assert is_equal(answer, [target]) is expected


LABELS = [
    r"\frac{\sqrt{3}}{2}", "x+1", "2x^2-3", r"\pi", r"3\sqrt{2}", "(1,2)", r"(-\infty, 3]", "A", r"\text{Monday}",
    "2^{10}", r"\{1,2,3\}", r"\begin{pmatrix}1\\2\end{pmatrix}", r"\sin x",
    "i", "2+3i", "x=5", "0.5", "1,000", r"10\%", r"90^\circ", r"\$32,348",
]  # fmt: skip


@pytest.mark.parametrize("label", LABELS)
def test_text_of_a_label_inside_the_tags_equals_it(label: str) -> None:
    assert is_equal(as_expression(label), [label])
    assert is_equal(as_expression(f"${label}$"), [label])


@pytest.mark.parametrize(
    ("answer", "label"),
    [("1, 2, 3, 4, 5", "5"), ("4 or 5", "5"), ("not 7", "7"), (r"3\sqrt{2}", "3"), ("(1,2)", "2"), (r"2^{10}", "10")],
)
def test_guesses_and_parts_inside_the_tags_are_wrong(answer: str, label: str) -> None:
    assert not is_equal(as_expression(answer), [label])


@pytest.mark.parametrize(
    "answer", ["**72**", "72.", "**72.**", "**72**.", " 72 apples", "$72$ apples", "x = 72", r"\$72", "`72`"]
)
def test_usual_wrappings_of_an_answer_are_right(answer: str) -> None:
    assert is_equal(as_expression(answer), ["72"])


def test_answer_may_equal_any_of_several_targets() -> None:
    assert is_equal("\\boxed{2}", ["3", "2"])


async def _scored(scorer: Scorer, *pairs: tuple[str, Any]) -> list[Score]:
    return await scorer([make_sample("1+1?" + response, "1+1?", label) for response, label in pairs])


async def test_answers_that_no_computer_works_out_are_wrong_and_cost_the_others_nothing() -> None:
    # The first would take years inside one calculation of Python's own, the second more memory than there is.
    scorer = make_math_scorer(2)
    endless = ("\\boxed{9^{9^{9^{9}}}}", "7")
    scores = await _scored(
        scorer, endless, ("<answer>\\boxed{2}</answer>", "2"), ("\\boxed{3}", 2), ("2<|im_end|>", {"target": ["2"]})
    )
    assert [score.reward for score in scores] == [0.0, 1.0, 0.0, 1.0]
    assert scores[0].logs["math_undecided"] in (0.0, 1.0)
    assert [score.logs for score in scores[1:]] == [{"math_undecided": 0.0}] * 3
    # A process that died was followed by another.
    assert [score.reward for score in await _scored(scorer, ("2", "2"), ("2", "2"))] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        (r"First \boxed{3}. Wait, no: \boxed{5}.", "5", 1.0),
        (r"First \boxed{5}. Wait, no: \boxed{3}.", "5", 0.0),
        (r"\boxed{A} no, \boxed{\text{B}}, not A", "B", 1.0),
        (r"$x=\boxed{3}$ and $y=\boxed{5}$", "3, 5", 1.0),
        (r"\boxed{\left\{\frac{1}{2}\right\}} or \boxed{\frac{1}{2}", r"\{\frac{1}{2}\}", 1.0),
        (r"<answer>\boxed{3} or \boxed{5}</answer>", "5", 0.0),
        (r"So \boxed {5.}", "5", 1.0),
        (r"So \boxed{.5}", "0.5", 1.0),
        (r"So \boxed{\text{(B)}.}", "B", 1.0),
    ],
)
async def test_last_of_several_boxes_counts(response: str, label: str, reward: float) -> None:
    assert [score.reward for score in await _scored(make_math_scorer(1), (response, label))] == [reward]


async def test_label_without_a_target_is_named_before_anything_is_compared() -> None:
    with pytest.raises(SampleError, match=r"\$\.labels\[1\] is None"):
        await _scored(make_math_scorer(1), ("2", "2"), ("2", None))


async def test_sample_whose_client_has_left_leaves_the_next_its_own_reply() -> None:
    scorer = make_math_scorer(1)
    await _scored(scorer, ("2", "2"))
    leaving = asyncio.ensure_future(_scored(scorer, ("3", "2")))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    leaving.cancel()
    assert [score.reward for score in await _scored(scorer, ("2", "2"))] == [1.0]
