"""Pairs of answers: each form's two contents, and rows that compare nothing."""

from typing import Any

import pytest

from learner.data.preference_forms import recognise_pair
from learner.data.sft_forms import BadRowError, Chat, Completion

USER = {"role": "user", "content": "q"}
SYSTEM = {"role": "system", "content": "s"}


def says(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def tokens(*ids: int) -> dict[str, list[int]]:
    """Return a prompt's tokens with an answer of one."""
    return {"input_ids": [*ids], "loss_mask": [0] * (len(ids) - 1) + [1]}


def test_tokens_are_answers_to_the_tokens_before_the_learnt_ones() -> None:
    longer = {"input_ids": [5, 6, 8, 9], "loss_mask": [0, 0, 1, 1]}
    assert recognise_pair({"chosen": tokens(5, 6, 8), "rejected": longer})[0] == "input_ids in chosen + rejected"
    whole = [{"input_ids": ids} for ids in ([5, 6], [5, 7])]
    assert recognise_pair({"chosen": whole[0], "rejected": whole[1]})[0] == "input_ids in chosen + rejected"


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": [USER], "chosen": [says("a")], "rejected": [says("b")]}, [USER]),
        ({"prompt": "q", "chosen": [USER, says("a")], "rejected": [USER, says("b")]}, [USER]),
        ({"chosen": [SYSTEM, USER, says("a")], "rejected": [SYSTEM, USER, says("b")]}, [SYSTEM, USER]),
        (
            {
                "conversations": [{"from": "human", "value": "q"}],
                "chosen": {"from": "gpt", "value": "a"},
                "rejected": {"from": "gpt", "value": "b"},
            },
            [USER],
        ),
        ({"instruction": "q", "input": "", "system": "s", "chosen": "a", "rejected": "b"}, [SYSTEM, USER]),
        ({"messages": [USER, says("a")], "rejected_response": "b"}, [USER]),
    ],
)
def test_answers_are_learnt_after_their_prompt(row: dict[str, Any], prompt: list[dict[str, str]]) -> None:
    _, contents = recognise_pair(row)
    expected = [Chat([*prompt, says(text)], [0.0] * len(prompt) + [1.0], None) for text in ("a", "b")]
    assert contents == expected


def test_texts_are_completions_of_their_prompt() -> None:
    form, contents = recognise_pair({"prompt": "q", "chosen": "a", "rejected": "b", "margin": None})
    assert form == "prompt + chosen + rejected"
    assert contents == [Completion("q", "a", None), Completion("q", "b", None)]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "q", "chosen": "a"}, "has the keys ['chosen', 'prompt'], expected chosen + rejected"),
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, "has equal answers"),
        ({"chosen": "q a", "rejected": "q b"}, "text without a prompt. Add the column prompt"),
        ({"chosen": [USER, says("a")], "rejected": [SYSTEM, says("b")]}, "do not begin with the same message"),
        ({"chosen": [USER, says("a")], "rejected": [USER]}, "the other one continues"),
        ({"prompt": "q", "chosen": 1, "rejected": 2}, "completion is 1, expected a string"),
        ({"system": "s", "prompt": "q", "chosen": "a", "rejected": "b"}, "has the column system, which this form does"),
        ({"images": ["p.png"], "prompt": "q", "chosen": "a", "rejected": "b"}, "has the column images, and only text"),
        (
            {"prompt": [SYSTEM, USER], "chosen": [USER, says("a")], "rejected": [USER, says("b")]},
            "in prompt, and the conversations in chosen and rejected do not begin with it",
        ),
        ({"history": [["x", "y"]], "prompt": "q", "chosen": "a", "rejected": "b"}, "has the column history, which"),
        ({"messages": [USER], "rejected_response": "b"}, "does not end with the assistant's chosen answer"),
    ],
)
def test_row_that_compares_nothing_is_refused(row: dict[str, Any], problem: str) -> None:
    with pytest.raises(BadRowError) as refused:
        recognise_pair(row)
    assert problem in str(refused.value)
