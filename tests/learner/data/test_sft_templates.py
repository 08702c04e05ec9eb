"""Demonstrations of chats in the templates of real models, and in tokenizers that put a space before each text."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import decoders

from learner.data.sft_forms import BadRowError
from learner.data.sft_rows import RowEncoder
from rollout.environments.tool_use.call_formats import choose_reader
from tests.fakes.tokenizer_families import tokenizer_of as family_of
from tests.rollout.environments.test_real_templates import FORMATS, TOOL, tokenizer_of

# Their texts for generation are no beginning of their whole texts.
REFUSED = ("deepseekv3", *(name for name in FORMATS["qwen3_coder"] if name.startswith("nemotron")))
WITH_CALLS = [name for names in FORMATS.values() for name in names if name not in REFUSED]
ASKED = {"role": "user", "content": "Where to?"}
CALL = {"type": "function", "id": "call00000", "function": {"name": "plan", "arguments": '{"city": "Paris"}'}}


def learnt(tokenizer: Any, folder: Path, row: dict[str, Any]) -> str:
    """Return the text of the tokens that a row teaches."""
    tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text("{}")
    (found,) = RowEncoder(folder).encode(row)
    return str(tokenizer.decode(found.tokens[found.weights > 0.0], skip_special_tokens=False))


@pytest.mark.parametrize("name", [*WITH_CALLS, "gemma3", "gptoss", "llama3", "phi3_5"])
def test_answer_is_learnt_whole_with_an_end(tmp_path: Path, name: str) -> None:
    text = learnt(tokenizer_of(name), tmp_path, {"messages": [ASKED, {"role": "assistant", "content": "To Zebra."}]})
    _, answer, end = text.partition("To Zebra.")
    assert answer
    assert end.strip().endswith(">")


@pytest.mark.parametrize("name", ["gemma3", "llama3", "phi3_5", "qwen2_5"])
def test_answer_as_text_behind_messages_ends_as_a_message_does(tmp_path: Path, name: str) -> None:
    said = {"role": "assistant", "content": "To Zebra."}
    text, message = ({"prompt": [ASKED], "completion": each} for each in (said["content"], [said]))
    assert learnt(tokenizer_of(name), tmp_path, text) == learnt(tokenizer_of(name), tmp_path, message)


@pytest.mark.parametrize("name", WITH_CALLS)
def test_call_with_its_arguments_as_a_text_is_learnt_as_it_is_read(tmp_path: Path, name: str) -> None:
    tokenizer = tokenizer_of(name)
    row = {"messages": [ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}], "tools": [TOOL]}
    (call,) = choose_reader("auto", tokenizer).read(learnt(tokenizer, tmp_path, row))[1]
    assert (call.name, call.arguments, call.problem) == ("plan", {"city": "Paris"}, None)


@pytest.mark.parametrize("name", REFUSED)
def test_template_that_writes_another_start_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadRowError, match='Give the row as "segments"'):
        learnt(tokenizer_of(name), tmp_path, {"messages": [ASKED, {"role": "assistant", "content": "To Zebra."}]})


@pytest.mark.parametrize(
    ("name", "messages", "part"),
    [
        ("llama3", [ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL], "weight": 0}, ASKED,
                    {"role": "assistant", "content": "a"}], "tool_calls"),
        ("llama3", [ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}], "tool_calls"),
        ("qwen2_5", [ASKED, {"role": "assistant", "content": "a", "reasoning_content": "b"}], "reasoning_content"),
        ("phi3_5", [{"role": "developer", "content": "Be kind."}, ASKED, {"role": "assistant", "content": "a"}],
         "content of the role 'developer'"),
    ],
)  # fmt: skip
def test_what_a_template_leaves_out_is_refused(tmp_path: Path, name: str, messages: list[Any], part: str) -> None:
    with pytest.raises(BadRowError, match=f"{part}: the model's chat template leaves out"):
        learnt(tokenizer_of(name), tmp_path, {"messages": messages})


@pytest.mark.parametrize("name", ["llama3", "phi"])  # no token of theirs crosses the start or the end of an answer
def test_chat_has_the_tokens_of_its_whole_text(tmp_path: Path, name: str) -> None:
    tokenizer = family_of(name)
    messages = [{"role": role, "content": "a a"} for role in ("user", "assistant", "user", "assistant")]
    whole = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False), add_special_tokens=False)["input_ids"]
    assert encoded(tokenizer, tmp_path, {"messages": messages}) == whole


@pytest.mark.parametrize("name", ["deepseek", "llama3", "mistral", "phi", "t5"])
def test_answer_behind_a_prompt_begins_without_another_space(tmp_path: Path, name: str) -> None:
    tokens = encoded(family_of(name), tmp_path, {"prompt": "a", "completion": " a"})[:-1]
    assert tokens == family_of(name)("a a")["input_ids"][: len(tokens)]


def encoded(tokenizer: Any, folder: Path, row: dict[str, Any]) -> list[int]:
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text("{}")
    (found,) = RowEncoder(folder).encode(row)
    tokens: list[int] = found.tokens.tolist()
    return tokens
