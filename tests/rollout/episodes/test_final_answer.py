"""The final answer in a model's last message."""

import pytest

from rollout.episodes.transcript import final_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("I think <answer> New  York </answer> but no: <answer>Paris</answer> done", "paris"),
        (r"so \boxed{1} and \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"cut \boxed{\frac{1", r"cut \boxed{\frac{1"),
        ("3 + 4 = 7\n#### 7\n", "7"),
        ("first\n\n  Last Line \n", "last line"),
        ("<answer></answer>", "<answer></answer>"),
        ("  \n", ""),
        ("x" * 500, "x" * 200),
    ],
)
def test_final_answer_is_the_last_one_given(text: str, answer: str) -> None:
    assert final_answer(text) == answer
