"""Calls of tools in a turn's text, as families of models write them, and the choice of the family by a proved call."""

import time
from typing import Any

import pytest

from protocol.errors import SettingsError
from rollout.environments.tool_use.call_formats import Call, CallReader, choose_reader
from tests.fakes.tool_models import CODER, FAMILIES

ADD = Call("add", {"a": 1, "b": "x"})
NOW = Call("now", {})
TEXT = Call("add", {"a": "1", "b": "x"})
TEXT_ARGUMENTS = (
    "{% for m in messages %}{{ m.role + m.content }}{% for c in m.tool_calls %}"
    """{{ '<tool_call>{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments + '}</tool_call>' }}"""
    "{% endfor %}{% endfor %}"
)
FORMATS = {"hermes": "hermes", "qwen3_coder": "hermes", "llama3_json": "llama3", "mistral": "mistral"}


def tokenizer_of(family: str, template: str | None = None) -> Any:
    tokenizer = FAMILIES[family].tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    return tokenizer


@pytest.fixture(scope="module")
def readers() -> dict[str, CallReader]:
    return {name: choose_reader(name, tokenizer_of(FORMATS[name], CODER if "coder" in name else None))
            for name in FORMATS}  # fmt: skip


@pytest.mark.parametrize(
    ("call_format", "text", "content", "calls"),
    [
        ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x"}}\n</tool_call><|im_end|>', "", [ADD]),
        ("hermes", 'I ask.<tool_call>{"name": "now", "arguments": {}}</tool_call>\n'
         '<tool_call>{"name": "now", "arguments": {}}</tool_call>', "I ask.", [NOW, NOW]),
        ("hermes", '<tool_call>{"name": "now", "arguments": {}}<|im_end|>', "", [NOW]),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": \\"x\\"}"}</tool_call>', "", [ADD]),
        ("hermes", '<think><tool_call>{"name": "now", "arguments": {}}</tool_call></think>Four.',
         '<think><tool_call>{"name": "now", "arguments": {}}</tool_call></think>Four.', []),
        ("hermes", '<think>Hm</think><tool_call>{"name": "now", "arguments": {}}</tool_call>', "<think>Hm</think>",
         [NOW]),
        ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx\n</parameter>\n"
         "</function>\n</tool_call>", "", [TEXT]),
        ("qwen3_coder", "<tool_call><function=now></function></tool_call>", "", [NOW]),
        ("qwen3_coder", "<think>Hm</think>\n\nI ask.\n<tool_call><function=now></function></tool_call>",
         "<think>Hm</think>\n\nI ask.", [NOW]),
        ("llama3_json", '{"name": "add", "parameters": {"a": 1, "b": "x"}}<|eot_id|>', "", [ADD]),
        ("llama3_json", '<|python_tag|>{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}', "",
         [NOW, NOW]),
        ("llama3_json", '{"answer": 4}', '{"answer": 4}', []),
        ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": "x"}}, {"name": "now", "arguments": {}}]'
         "</s>", "", [ADD, NOW]),
        *[(name, text, text, []) for name in FORMATS for text in ("", "It is four.", "<answer>4</answer>")],
    ],
)  # fmt: skip
def test_calls_of_each_family_are_read(
    readers: dict[str, CallReader], call_format: str, text: str, content: str, calls: list[Call]
) -> None:
    assert readers[call_format].read(text) == (content, calls)


@pytest.mark.parametrize(
    ("call_format", "text", "problem"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1</tool_call>', "not a complete call in the format"),
        ("hermes", "<tool_call>[1]</tool_call>", "not a complete call"),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "arguments are not a JSON object"),
        ("hermes", "<tool_call>" + "[" * 100_000, "not a complete call"),
        ("qwen3_coder", "<tool_call>add(1)</tool_call>", "not a complete call"),
        ("qwen3_coder", "<tool_call>\n<function=ad", "not a complete call"),
        ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n", "not a complete call"),
        ("llama3_json", "<|python_tag|>import os", "not a complete call"),
        ("llama3_json", '{"name": "add", "parameters": ', "not a complete call"),
        ("mistral", "[TOOL_CALLS]add", "not a complete call"),
        ("mistral", "[TOOL_CALLS][7]", "not a complete call"),
        ("mistral", '[TOOL_CALLS][{"arguments": {}}]', "it has no name"),
    ],
)
def test_broken_call_has_a_problem(readers: dict[str, CallReader], call_format: str, text: str, problem: str) -> None:
    _, (call,) = readers[call_format].read(text)
    assert problem in str(call.problem)


def test_call_with_many_angle_brackets_is_read_fast(readers: dict[str, CallReader]) -> None:
    html = '<div class="x"><p>Hello</p> <b>a -> b</b></div>\n' * 400
    text = f"<tool_call><function=write>\n<parameter=text>\n{html}\n</parameter>\n</function></tool_call>"
    begin = time.process_time()
    assert readers["qwen3_coder"].read(text) == ("", [Call("write", {"text": html})])
    assert time.process_time() - begin < 5.0


@pytest.mark.parametrize(
    ("family", "template", "call_format"),
    [
        *((family, None, name) for family, name in (("hermes", "hermes"), ("llama3", "llama3_json"))),
        ("mistral", None, "mistral"),
        ("hermes", CODER, "qwen3_coder"),
        ("hermes", TEXT_ARGUMENTS, "hermes"),
    ],
)
def test_format_is_the_one_that_reads_the_templates_own_call(
    family: str, template: str | None, call_format: str
) -> None:
    assert choose_reader("auto", tokenizer_of(family, template)).call_format == call_format


WRITES_PYTHON = "{{ messages }}"
WRITES_NO_CALL = "{{ messages[-1].content }}"


@pytest.mark.parametrize(
    ("wanted", "template", "problem"),
    [
        ("auto", WRITES_NO_CALL, "call_format = auto, but the chat template of policy.model writes no call of an"),
        ("auto", WRITES_PYTHON, "writes a call that none of vLLM's parsers reads: "),
        ("mistral", None, "vLLM's parser does not fit policy.model: "),
        ("qwen3_coder", None, "this format does not read the call that the chat template of policy.model writes: "),
        ("none", None, "tools.call_format = none: vLLM has no such tool parser. It has "),
    ],
)
def test_format_that_reads_no_known_call_is_refused(wanted: str, template: str | None, problem: str) -> None:
    with pytest.raises(SettingsError) as refused:
        choose_reader(wanted, tokenizer_of("hermes", template))
    assert problem in str(refused.value)


def test_named_format_is_trusted_where_the_template_writes_no_calls() -> None:
    assert choose_reader("hermes", tokenizer_of("hermes", WRITES_NO_CALL)).call_format == "hermes"
    assert choose_reader("llama3", tokenizer_of("llama3", WRITES_NO_CALL)).call_format == "llama3_json"
