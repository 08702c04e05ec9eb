"""A turn's text to calls, as each family of models writes them, whole and broken."""

import pytest

from rollout.environments.tool_use.call_formats import CALL_FORMATS, Call, format_of_template

ADD = Call("add", {"a": 1, "b": "x"})
NOW = Call("now", {})
TEXT = Call("add", {"a": "1", "b": "x"})


@pytest.mark.parametrize(
    ("call_format", "text", "calls"),
    [
        ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x"}}\n</tool_call><|im_end|>', [ADD]),
        ("hermes", 'I ask.<tool_call>{"name": "now"}</tool_call>\n<tool_call>{"name": "now"}</tool_call>', [NOW, NOW]),
        ("hermes", '<tool_call>{"name": "now", "arguments": {}}<|im_end|>', [NOW]),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": \\"x\\"}"}</tool_call>', [ADD]),
        ("hermes", '<think><tool_call>{"name": "now"}</tool_call></think>It is four.', []),
        ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx\n</parameter>\n"
         "</function>\n</tool_call>", [TEXT]),
        ("qwen3_coder", "<tool_call><function=now></function></tool_call>", [NOW]),
        ("llama3", '{"name": "add", "parameters": {"a": 1, "b": "x"}}<|eot_id|>', [ADD]),
        ("llama3", '<|python_tag|>{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}<|eom_id|>',
         [NOW, NOW]),
        ("llama3", '{"answer": 4}', []),
        ("llama3", 'I would call {"name": "now", "parameters": {}}', []),
        ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": "x"}}, {"name": "now"}]</s>', [ADD, NOW]),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1, "b": "x"}[TOOL_CALLS]now[ARGS]{}</s>', [ADD, NOW]),
        ("mistral", '[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}</s>', [NOW]),
        *[(name, text, []) for name in CALL_FORMATS for text in ("", "It is four.", "<answer>4</answer>")],
    ],
)  # fmt: skip
def test_calls_of_each_family_are_read(call_format: str, text: str, calls: list[Call]) -> None:
    assert CALL_FORMATS[call_format](text) == calls


@pytest.mark.parametrize(
    ("call_format", "text", "problem"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1</tool_call>', "it is not JSON"),
        ("hermes", "<tool_call>[1]</tool_call>", "not an object with a name"),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "arguments are not a JSON object"),
        ("hermes", "<tool_call>" + "[" * 100_000, "nested too deeply"),
        ("qwen3_coder", "<tool_call>add(1)</tool_call>", "no <function=name>"),
        ("llama3", "<|python_tag|>import os", "it is not JSON"),
        ("llama3", '{"name": "add", "parameters": ', "it is not JSON"),
        ("mistral", "[TOOL_CALLS]add", "it is not JSON"),
        ("mistral", "[TOOL_CALLS][7]", "not an object with a name"),
    ],
)
def test_broken_call_says_what_is_wrong(call_format: str, text: str, problem: str) -> None:
    (call,) = CALL_FORMATS[call_format](text)
    assert problem in str(call.problem)


@pytest.mark.parametrize(
    ("template", "call_format"),
    [
        ("{{ '<tool_call>\\n' }}{{ call | tojson }}{{ '</tool_call>' }}", "hermes"),
        ("{{ '<tool_call>\\n<function=' + call.name }}", "qwen3_coder"),
        ("{{ '<|start_header_id|>ipython<|end_header_id|>' }}", "llama3"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("{{ messages[0].content }}", None),
    ],
)
def test_template_tells_its_family(template: str, call_format: str | None) -> None:
    assert format_of_template(template) == call_format
