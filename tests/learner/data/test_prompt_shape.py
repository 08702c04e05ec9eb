"""Templates, system prompts and the switch between text and chat."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from learner.data.prompts import shape_of
from protocol.errors import SettingsError
from protocol.settings.data import DataEntry, DataSettings

_USER = {"role": "user", "content": "Who?"}
_SYSTEM = {"role": "system", "content": "Be brief."}


def prompt_of(row: dict[str, Any], **data: Any) -> Any:
    return shape_of(DataSettings(**data), DataEntry(path="rows.jsonl")).apply(row, "rows.jsonl line 3")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("User: {}\nAssistant: ", "User: Who?\nAssistant: "),
        ("Q: {question} ({hops})", "Q: Where? (2)"),
        ("{extra[index][1]} of {extra[of]}", "8 of 9"),
        ("{{}} {prompt}", "{} Who?"),
    ],
)
def test_template_is_filled_from_the_columns(template: str, expected: str) -> None:
    row = {"prompt": "Who?", "question": "Where?", "hops": 2, "extra": {"index": [7, 8], "of": 9}}
    assert prompt_of(row, template=template) == expected


@pytest.mark.parametrize("template", ["Question", "{", "{a.b}", "{a!r}", "{a:>3}", "{[x]}"])
def test_template_that_is_none_is_refused_with_the_settings(template: str) -> None:
    with pytest.raises(ValidationError):
        DataSettings(template=template)


def test_messages_that_become_text_are_their_texts() -> None:
    parts = [{"type": "text", "text": "Who"}, {"type": "text", "text": "?"}]
    messages = [_SYSTEM, {"role": "user", "content": parts}, {"role": "assistant", "content": None}]
    assert prompt_of({"prompt": messages}, apply_chat_template=False) == "Be brief.\n\nWho?\n\n"
    with pytest.raises(SettingsError, match="line 3: message 1 has the content None, expected text or parts of text"):
        prompt_of({"prompt": [{"role": "user", "content": None}]}, apply_chat_template=False)


def test_column_that_the_template_names_and_a_row_has_not_is_said() -> None:
    with pytest.raises(SettingsError) as caught:
        prompt_of({"prompt": "a"}, template="{question}")
    assert str(caught.value) == (
        "data: rows.jsonl line 3 has no 'question', which the template names. Its columns are ['prompt']. "
        "Change data.template, or fix the row."
    )
    with pytest.raises(SettingsError, match=r"line 3 has \['a'\] where the template wants text or a number"):
        prompt_of({"prompt": ["a"]}, template="{}")


def test_system_prompt_stands_before_prompts_that_have_none() -> None:
    assert prompt_of({"prompt": "Who?"}, system_prompt="Be brief.") == [_SYSTEM, _USER]
    assert prompt_of({"prompt": [_USER]}, system_prompt="Be brief.") == [_SYSTEM, _USER]
    own = [{"role": "system", "content": "Be long."}, _USER]
    assert prompt_of({"prompt": own}, system_prompt="Be brief.") == own


def test_text_becomes_a_chat_and_a_chat_text_when_told_to() -> None:
    assert prompt_of({"prompt": "Who?"}, apply_chat_template=True) == [_USER]
    assert prompt_of({"prompt": [_SYSTEM, _USER]}, apply_chat_template=False) == "Be brief.\n\nWho?"
    assert prompt_of({"prompt": "Who?"}) == "Who?"
    assert prompt_of({"prompt": [_USER]}) == [_USER]


def test_template_and_chat_go_together() -> None:
    row = {"question": "Who?"}
    assert prompt_of(row, template="{question}", apply_chat_template=True) == [_USER]


def test_system_prompt_and_no_chat_contradict_each_other(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=r"apply_chat_template = false forbids it"):
        DataSettings(system_prompt="x", apply_chat_template=False)
