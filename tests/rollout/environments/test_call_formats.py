"""Calls of tools in a turn's text, as families of models write them, and the choice of the family by a proved call."""

import asyncio
import re
import time
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from protocol.errors import SettingsError
from rollout.environments.tool_use.call_formats import Call, CallReader, choose_reader
from tests.fakes.tool_models import CODER, FAMILIES, byte_core

ADD = Call("add", {"a": 1, "b": "x"})
NOW = Call("now", {})
SAY = Call("say", {"text": "</think>"})
TEXT = Call("add", {"a": "1", "b": "x"})
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
        ("hermes", '<think>Hm</think><tool_call>{"name": "say", "arguments": {"text": "</think>"}}</tool_call>',
         "<think>Hm</think>", [SAY]),
        ("hermes", '<tool_call>{"name": "say", "arguments": {"text": "</think>"}}</tool_call>', "", [SAY]),
        ("hermes", 'I.<tool_call>{"name": "now", "arguments": {}}</tool_call><tool_call>{"name": "ad</tool_call>'
         '<tool_call>{"name": "add", "arguments": {"a": 1, "b": "x"}}</tool_call>', "I.",
         [NOW, Call("", {}, "it is not a complete call in the format hermes"), ADD]),
        ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx\n</parameter>\n"
         "</tool_call>", "", [TEXT]),
        ("qwen3_coder", "<function=now></function>\n</tool_call>", "", [NOW]),
        ("llama3_json", '{"name": "now", "parameters": {}}; {"name": "add", "parameters": {"a": ', "",
         [NOW, Call("", {}, "it is not a complete call in the format llama3_json")]),
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
    ("text", "ids"),
    [
        ('[{"name": "now", "arguments": {}, "id": "abcdefghi"}, {"name": "now", "arguments": {}, "id": "VvvODy9mT"}]',
         ["abcdefghi", "VvvODy9mT"]),
        ('[{"name": "now", "arguments": {"id": "abcdefghi"}}]', [""]),
    ],
)  # fmt: skip
def test_ids_that_a_policy_gave_to_its_calls_are_read(
    readers: dict[str, CallReader], text: str, ids: list[str]
) -> None:
    assert [call.id for call in readers["mistral"].read(f"[TOOL_CALLS] {text}")[1]] == ids


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


WRITES_PYTHON = "{{ messages }}"
WRITES_NO_CALL = "{{ messages[-1].content }}"
RAISES = "{{ raise_exception('roles must alternate') if messages | length > 1 }}"


@pytest.mark.parametrize(
    ("wanted", "template", "problem"),
    [
        ("auto", WRITES_NO_CALL, "call_format = auto, but the chat template of policy.model writes no call of an"),
        ("auto", RAISES, "cannot write a call of an earlier turn: TemplateError: roles must alternate"),
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


def _writing(written: str, prompt_end: str = "") -> Any:
    """Return a byte tokenizer with the control tokens of a model's call, and a chat template that writes this call."""
    names = sorted(set(re.findall(r"<[^<> ={}]*>|\[/?[A-Z_]{3,}\]", written)))
    core = byte_core()
    core.add_tokens(
        [AddedToken(name, special=name[1] in "|[\uff5c" or name[0] == "[", normalized=False) for name in names]
    )
    core.add_special_tokens(["<|user|>", *(["<|python_tag|>"] if "<|eot_id|>" in written else [])])
    turn = "<|user|>{{ m.content }}{% if m.tool_calls %}{% raw %}" + written + "{% endraw %}{% endif %}"
    template = "{% for m in messages %}" + turn + "{% endfor %}" + prompt_end
    return PreTrainedTokenizerFast(tokenizer_object=core, chat_template=template)


KNOWN = '{"name": "lookup_city", "arguments": {"city": "Paris"}}'
BAR, SPACE = "\uff5c", "\u2581"  # of DeepSeek's control tokens


def _deepseek(written: str) -> str:
    marks = (
        f"<{BAR}{name}{BAR}>" for name in ("tool_calls_begin", "tool_call_begin", "tool_call_end", "tool_calls_end")
    )
    before, begin, end, after = (mark.replace("_", SPACE) for mark in marks)
    return f"{before}{begin}{written}{end}{after}"


# Calls in the form of models whose templates test_real_templates.py has not. Templates: llama-cpp-python 0.3.16, vLLM
# 0.11. The forms of Seed-OSS, MiniMax, FunctionGemma and OLMo 3 are written without their templates.
@pytest.mark.parametrize(
    ("written", "call_format"),
    [
        (f"[TOOL_CALLS][{KNOWN[:-1]}, \"id\": \"call00000\"}}]</s>", "mistral"),  # Mistral Nemo
        (f"[TOOL_CALLS] [{KNOWN[:-1]}, \"id\": \"call00000\"}}]</s>", "mistral"),  # Mistral 7B 0.3
        ('[TOOL_CALLS]lookup_city[ARGS]{"city": "Paris"}</s>', "mistral"),  # Devstral 2507
        ('[TOOL_CALLS]lookup_city[CALL_ID]call00000[ARGS]{"city": "Paris"}</s>', "mistral"),  # Mistral Small 3.2
        ("<|tool_calls_section_begin|><|tool_call_begin|>functions.lookup_city:0<|tool_call_argument_begin|>"
         '{"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|><|im_end|>', "kimi_k2"),  # Kimi K2
        (_deepseek(f'lookup_city<{BAR}tool{SPACE}sep{BAR}>{{"city": "Paris"}}'), "deepseek_v31"),  # DeepSeek V3.1
        (f"<|tool_call|>[{KNOWN}]<|end_of_text|>\n", "granite"),  # Granite 3, Phi-4 mini
        (f"\n<function_call> {KNOWN}\n<|endoftext|>\n", "granite-20b-fc"),  # Granite 20B
        (f"<tool_calls>[{KNOWN}]</tool_calls><|eos|>", "hunyuan_a13b"),  # Hunyuan A13B, Jamba
        (f"<|action_start|><|plugin|>\n{KNOWN}<|action_end|><|im_end|>\n", "internlm"),  # InternLM 2.5
        ('[lookup_city(city="Paris")]<|eot|>', "llama4_pythonic"),  # Llama 4, Gemma 3
        (f"[{KNOWN}]<|im_end|>\n", "xlam"),  # xLAM
        ("<seed:tool_call>\n<function=lookup_city>\n<parameter=city>Paris</parameter>\n</function>\n</seed:tool_call>",
         "qwen3_coder"),  # Seed-OSS
        ('<minimax:tool_call>\n<invoke name="lookup_city">\n<parameter name="city">Paris</parameter>\n</invoke>\n'
         "</minimax:tool_call>", "minimax_m2"),  # MiniMax M2
        ("<start_function_call>call:lookup_city{city:<escape>Paris<escape>}<end_function_call>",
         "functiongemma"),  # FunctionGemma
        ('<function_calls>lookup_city(city="Paris")</function_calls><|im_end|>', "olmo3"),  # OLMo 3
    ],
)  # fmt: skip
def test_call_in_a_models_form_is_read_back(written: str, call_format: str) -> None:
    reader = choose_reader("auto", _writing(written))

    assert reader.call_format == call_format
    (call,) = reader.read("I look.\n" + written)[1]
    assert call == Call("lookup_city", {"city": "Paris"})
    ids = {"kimi_k2": "functions.lookup_city:0", "mistral": "call00000"}
    assert call.id == (ids.get(call_format, "") if ids.get(call_format, "") in written else "")


@pytest.mark.parametrize("call", ['[lookup_city(city="Paris")]', f"[{KNOWN}]"])  # Llama 4 and xLAM: no closing tag
@pytest.mark.parametrize("end_of_the_template", ["<|eot|>", "<|eom|>"])
def test_call_is_read_before_an_end_that_its_tokenizer_takes_for_text(call: str, end_of_the_template: str) -> None:
    tokenizer = _writing(call + end_of_the_template)
    tokenizer.add_tokens([AddedToken("<|eom|>", special=False, normalized=False)])
    end = tokenizer.convert_tokens_to_ids("<|eom|>")
    (read,) = choose_reader("auto", tokenizer, ends={end}).read(f"{call}<|eom|>")[1]
    assert read == Call("lookup_city", {"city": "Paris"})


def test_thought_that_the_template_opened_calls_nothing() -> None:
    written = f"<tool_call>\n{KNOWN}\n</tool_call>"
    texts = [f"Hm {written}</think>Four.", f"Hm</think>{written}"]
    plain, opened = (choose_reader("auto", _writing(written, end)) for end in ("", "<think>\n"))

    assert [len(opened.read(text)[1]) for text in texts] == [0, 1]
    assert [len(plain.read(text)[1]) for text in texts] == [1, 1]


async def test_event_loop_continues_while_a_long_turn_is_read(readers: dict[str, CallReader]) -> None:
    text = "<tool_call>" + "<" * 40_000
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0)
            ticks += 1

    ticking = asyncio.ensure_future(tick())
    _, (call,) = await readers["qwen3_coder"].read_async(text)
    ticking.cancel()

    assert call.problem is not None
    assert ticks > 10


def test_call_inside_a_thought_that_the_settings_open_is_none() -> None:
    tokenizer = tokenizer_of("hermes")
    opening = "{% if enable_thinking is defined and enable_thinking %}<think>\n{% endif %}"
    tokenizer.chat_template += "{% if add_generation_prompt %}" + opening + "{% endif %}"
    call = '<tool_call>\n{"name": "find", "arguments": {}}\n</tool_call>'
    reader = choose_reader("hermes", tokenizer, {"enable_thinking": True})
    assert reader.read(f"Perhaps {call}? No.</think>\nIt is 5.")[1] == []
    assert choose_reader("hermes", tokenizer).read(f"Yes: {call}")[1] == [Call("find", {})]
