"""Single answers with a label: each form's answer and label, and rows that say no answer or no label."""

from typing import Any

import pytest

from learner.data.preference_forms import recognise_unpaired
from learner.data.sft_forms import BadRowError, Chat, Completion

USER = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}
CHAT = Chat([USER, ANSWER], [0.0, 1.0], None)
TEXT = Completion("q", "a", None)


@pytest.mark.parametrize(
    ("row", "form", "content", "label"),
    [
        ({"prompt": "q", "completion": "a", "label": True}, "prompt + completion + label true", TEXT, True),
        ({"prompt": [USER], "completion": [ANSWER], "label": False}, "prompt + completion + label false", CHAT, False),
        ({"messages": [USER, ANSWER], "label": 1}, "messages + label true", CHAT, True),
        (
            {
                "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}],
                "kto_tag": False,
                "label": None,
            },
            "conversations + kto_tag false",
            CHAT,
            False,
        ),
        ({"instruction": "q", "output": "a", "kto_tag": True}, "instruction + output + kto_tag true", CHAT, True),
        ({"input": "q", "output": "a", "label": 0}, "input + output + label false", TEXT, False),
    ],
)
def test_each_form_has_its_answer_and_label(row: dict[str, Any], form: str, content: Any, label: bool) -> None:
    assert recognise_unpaired(row) == (form, content, label)


def test_last_message_alone_is_the_answer() -> None:
    _, content, _ = recognise_unpaired({"messages": [USER, ANSWER, USER, ANSWER], "label": True})
    assert isinstance(content, Chat)
    assert content.weights == [0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "q", "completion": "a"}, "expected one of label and kto_tag, true or false"),
        ({"prompt": "q", "completion": "a", "label": True, "kto_tag": True}, "expected one of label and kto_tag"),
        ({"prompt": "q", "completion": "a", "label": "good"}, "label is 'good', expected true or false"),
        ({"prompt": "q", "completion": "a", "label": -1}, "label is -1, expected true or false"),
        ({"prompt": "q", "label": True}, "has the keys ['prompt'], expected one of these"),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "label": True}, "has the column 'chosen' of a pair"),
        ({"prompt": 1, "completion": "a", "label": True}, "prompt is 1, expected a list of messages"),
        ({"prompt": "q", "completion": [ANSWER], "label": True}, "expected a string"),
        ({"text": "q a", "label": True}, "does not say where the answer begins. Give prompt + completion"),
        ({"input_ids": [1, 2], "label": True}, "does not say where the answer begins. Give prompt + completion"),
        ({"messages": [USER], "label": True}, "has no message of the role assistant"),
        ({"messages": [USER, ANSWER, USER], "label": True}, "does not end with a message of the role assistant"),
        ({"system": "s", "prompt": "q", "completion": "a", "label": True}, "has the column system"),
    ],
)
def test_row_without_one_labelled_answer_is_refused(row: dict[str, Any], problem: str) -> None:
    with pytest.raises(BadRowError) as refused:
        recognise_unpaired(row)
    assert problem in str(refused.value)
