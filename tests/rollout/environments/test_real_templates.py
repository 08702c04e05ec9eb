"""Calls of tools as the chat templates of real models write them. TRL ships the templates; none of its code runs."""

import importlib.util
import json
import os.path
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from protocol.errors import NeighbourError, SettingsError
from protocol.settings.tools import ToolsSettings
from rollout.endpoint.chat import read_chat
from rollout.endpoint.rendering import Rendering
from rollout.endpoint.requests import Refusal, SessionSampling
from rollout.environments.base import Chat, Resources
from rollout.environments.tool_use.arguments import fit_arguments
from rollout.environments.tool_use.call_formats import Call, choose_reader, required_of
from rollout.environments.tool_use.tool_use import make_tool_use
from rollout.episodes.chat_tokens import ChatTokens
from tests.fakes.tool_models import byte_core

FORMATS = {
    "deepseek_v3": ("deepseekv3",),
    "gemma4": ("diffusion_gemma", "gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5"),
    "glm45": ("glm4moe",),
    "hermes": ("qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl"),
    "lfm2": ("lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl", "lfm2_v2"),
    "llama3_json": ("llama3_1", "llama3_2"),
    "qwen3_coder": (
        *("nemotron_3_5_lightning", "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra"),
        *("qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8"),
    ),
}
ONE_CALL_A_TURN = ("llama3_1", "llama3_2")
WITHOUT_ESCAPES = ("lfm2_2_5", "lfm2_2_5_v2")  # a quote in a text makes the call broken Python
FIELDS = {
    "city": {"type": "string"},
    "zip": {"type": "string"},
    "days": {"type": "integer"},
    "x": {"type": "number"},
    "deep": {"type": "boolean"},
    "tags": {"type": "array", "items": {"type": "string"}},
}
TOOL = {
    "type": "function",
    "function": {"name": "plan", "description": "Plans.", "parameters": {"type": "object", "properties": FIELDS}},
}
TRIP = {"city": "Paris", "zip": "00501", "days": 3, "x": 1.5, "deep": True, "tags": ["a", "b"]}
ODD = {"city": 'He said "hi", it\'s <b>é</b> {x} [1] 漢字 😀\nnext\tline', "zip": "true"}


def template_of(name: str) -> str:
    spec = importlib.util.find_spec("trl")
    assert spec is not None
    assert spec.origin is not None
    return (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def tokenizer_of(name: str) -> Any:
    """Return a byte tokenizer with a template, and its control tokens."""
    template = template_of(name)
    core = byte_core()
    marks = sorted(set(re.findall(r"<[^<> ={}'\"\n]{1,60}>", template)))
    core.add_tokens([AddedToken(mark, special=mark[1] in "|\uff5c", normalized=False) for mark in marks])
    core.add_special_tokens(["<s>", "</s>", *(["<|python_tag|>"] if "<|eot_id|>" in template else [])])
    return PreTrainedTokenizerFast(tokenizer_object=core, chat_template=template, bos_token="<s>", eos_token="</s>")


def written(tokenizer: Any, calls: list[dict[str, Any]]) -> str:
    """Return a turn with these calls of `plan` as the template writes it: what it has besides a turn without any."""

    def rendered(turn: dict[str, Any]) -> str:
        messages = [{"role": "user", "content": "Where?"}, {"role": "assistant", **turn}]
        return str(tokenizer.apply_chat_template(messages, tools=[TOOL], tokenize=False))

    def turn(encode: Callable[[Any], Any]) -> dict[str, Any]:
        functions = [{"name": "plan", "arguments": encode(call)} for call in calls]
        return {
            "content": "",
            "tool_calls": [{"id": "call00000", "type": "function", "function": f} for f in functions],
        }

    try:
        calling = rendered(turn(lambda call: call))
    except TypeError:  # DeepSeek's template takes arguments as a text
        calling = rendered(turn(json.dumps))
    common = os.path.commonprefix([rendered({"content": "Zebra"}), calling])  # noqa: RUF071  texts, not paths
    return calling[len(common[: common.rfind("<")] if common.rfind("<") > common.rfind(">") else common) :]


@pytest.mark.parametrize(("name", "call_format"), [(name, each) for each, names in FORMATS.items() for name in names])
def test_calls_that_a_real_template_writes_are_read_back(name: str, call_format: str) -> None:
    tokenizer = tokenizer_of(name)
    reader = choose_reader("auto", tokenizer)
    assert reader.call_format == call_format
    odd = TRIP if name in WITHOUT_ESCAPES else ODD
    for calls in [[odd], [{}], [odd] if name in ONE_CALL_A_TURN else [TRIP, odd]]:
        read = reader.read("I look.\n" + written(tokenizer, calls))[1]
        assert [(call.name, fit_arguments(call.arguments, TOOL), call.problem) for call in read] == [
            ("plan", call, None) for call in calls
        ]


def test_tool_whose_name_a_format_cannot_write_is_refused() -> None:
    """In LFM2's format a call is Python's. Names of tools of MCP servers often have a hyphen."""

    def resources(model: str, tool: str) -> Resources:
        schema = {"type": "function", "function": {**TOOL["function"], "name": tool}}
        return Resources(1, {tool: SimpleNamespace(schema=schema)}, tokenizer_of(model))  # type: ignore[dict-item]

    said = (
        r"settings: tools: no call of the tool 'get-forecast' could be read in the format lfm2\. Give it another name"
    )
    with pytest.raises(SettingsError, match=said):
        make_tool_use(ToolsSettings(names=[])).check_names(resources("lfm2_v2", "get-forecast"))
    make_tool_use(ToolsSettings(names=[])).check_names(resources("lfm2_v2", "get_forecast"))
    make_tool_use(ToolsSettings(names=[])).check_names(resources("qwen3", "get-forecast"))


@pytest.mark.parametrize(("model", "is_refused"), [("lfm2_v2", True), ("qwen3", False)])
@pytest.mark.parametrize("argument", ["max-results", "$filter"])
def test_tool_with_a_required_argument_that_a_format_cannot_write_is_refused(
    model: str, is_refused: bool, argument: str
) -> None:
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}}
    reader = choose_reader("auto", tokenizer_of(model))
    for required in ([argument], []):
        tool = {"type": "function", "function": {"name": "find", "parameters": {**parameters, "required": required}}}
        problem = reader.problem_of_tool("find", required_of(tool))
        assert (problem is not None) == (is_refused and bool(required))
        assert problem is None or f"the tool 'find' with its argument '{argument}' could be read in the" in problem


def test_agents_tool_whose_name_a_format_cannot_write_is_refused() -> None:
    tool = {"type": "function", "function": {**TOOL["function"], "name": "get-forecast"}}
    raw = json.dumps({"messages": [{"role": "user", "content": "x"}], "tools": [tool]}).encode()
    rendering = Rendering(tokenizer_of("lfm2_v2"), "auto", {}, frozenset())
    try:
        with pytest.raises(Refusal, match="no call of the tool 'get-forecast' could be read in the format lfm2"):
            rendering.read(read_chat, raw, SessionSampling(1.0, "refuse"))
    finally:
        rendering.close()


@pytest.mark.parametrize("name", ["gemma3", "gptoss", "llama3"])
def test_real_template_whose_calls_cannot_be_read_is_refused(name: str) -> None:
    with pytest.raises(
        SettingsError, match=r"chat template of policy\.model writes (no call of an|a call that none of)"
    ):
        choose_reader("auto", tokenizer_of(name))


@pytest.mark.parametrize("name", [each for each in FORMATS["gemma4"] if each != "gemma4_v2"])
def test_results_that_a_template_writes_inside_the_turn_with_their_calls_are_as_in_the_whole_conversation(
    name: str,
) -> None:
    tokenizer, asked = tokenizer_of(name), {"role": "user", "content": "Where?"}
    calls = [
        {"id": f"call0000{place}", "type": "function", "function": {"name": "plan", "arguments": {"city": city}}}
        for place, city in enumerate(("Ulm", "Rom"))
    ]
    results = [{"role": "tool", "name": "plan", "tool_call_id": call["id"], "content": "dry"} for call in calls]
    messages = [asked, {"role": "assistant", "content": "", "tool_calls": calls}, *results]
    whole = tokenizer.apply_chat_template(messages, tools=[TOOL], add_generation_prompt=True, tokenize=False)
    chat = ChatTokens(tokenizer)
    turn = tokenizer.encode(written(tokenizer, [{"city": "Ulm"}, {"city": "Rom"}]), add_special_tokens=False)
    assert turn[-1] == tokenizer.convert_tokens_to_ids("<|tool_response>")
    for last_token, begun in ((turn[-1], turn), (5, turn[:-1])):
        tokens = [*chat.prompt(Chat([asked], [TOOL])), *begun, *chat.reply(results, [TOOL], last_token, 1000)[0]]
        assert tokens == tokenizer.encode(whole, add_special_tokens=False)


@pytest.mark.parametrize("name", ["cohere2", "phi3_5"])
def test_real_template_that_omits_results_of_tools_is_refused(name: str) -> None:
    tokenizer = tokenizer_of(name)
    with pytest.raises(SettingsError, match=r"chat template of policy\.model omits the results of tools: the"):
        choose_reader("hermes", tokenizer)
    result = {"role": "tool", "tool_call_id": "call00000", "content": "sunny"}
    with pytest.raises(NeighbourError, match="environment: the model's chat template omits one of the messages: tool"):
        ChatTokens(tokenizer).reply([result], [], 5, 1000)


@pytest.mark.parametrize("name", ["deepseek_r1_distill", "qwen3_vl"])
def test_second_system_message_that_a_real_template_omits_is_refused(name: str) -> None:
    messages = [{"role": role, "content": "Be brief."} for role in ("system", "system", "user")]
    with pytest.raises(NeighbourError, match="prompt: the model's chat template omits one of the messages: system, s"):
        ChatTokens(tokenizer_of(name)).prompt(messages)
    assert ChatTokens(tokenizer_of("qwen3")).prompt(messages)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("qwen3_6", text) for text in ("a </parameter> b", "a </function> b", "<parameter=x>1</parameter> b")),
        *(("glm4moe", text) for text in ("a </arg_value> b", "a </tool_call> b")),
    ],
)
def test_call_whose_argument_an_end_tag_cuts_has_a_problem(name: str, text: str) -> None:
    tokenizer = tokenizer_of(name)
    (call,) = choose_reader("auto", tokenizer).read(written(tokenizer, [{"city": text, "zip": "1"}]))[1]
    assert call == Call("", {}, "an argument contains a tag that ends arguments or calls")
