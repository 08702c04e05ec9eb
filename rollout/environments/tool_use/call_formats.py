"""How a model writes a call of a tool: read by vLLM's tool parsers. The door to `vllm.tool_parsers`.

With `tools.call_format: auto` a known call is rendered by the model's chat template and parsed back by one parser after
the other. The first that returns this very call is used. So a format is proved before it is trusted.
"""

import asyncio
import itertools
import json
import logging
import os.path
import re
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from protocol.errors import SettingsError
from protocol.one_line import describe_error

# The formats of most models. `auto` tries vLLM's other parsers after them, in the order of their names.
USUAL_FORMATS = ("hermes", "qwen3_coder", "llama3_json", "mistral")
_OLD_NAMES = {"llama3": "llama3_json"}
_THOUGHT, _THOUGHT_END = "<think>", "</think>"
# Newer templates of Mistral write an id that vLLM's parser does not know.
_CALL_ID = re.compile(r"\[CALL_ID\]\w*")
# An id that the policy gave to its call, in newer and older templates of Mistral; results name it.
_WRITTEN_ID = re.compile(r'(?<=\[CALL_ID\])\w{9}(?=\W)|(?<="id": ")[A-Za-z0-9]{9}(?="\}[,\]])')
_MAX_PIECES = 64
# Some parsers take time with the square of the length: a second for 138,000 brackets.
_LONG_TURN = 1 << 13
_PROBE_NAME = "lookup_city"
_PROBE_ARGUMENTS = {"city": "Paris"}
_MARK = "\ue000"
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": _PROBE_NAME,
        "description": "Looks a city up.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@dataclass(frozen=True)
class Call:
    """One call as the policy wrote it."""

    name: str  # tool's name; empty where the call cannot be read
    arguments: Mapping[str, Any]
    problem: str | None = None  # reason why the call cannot be read; None: it was read
    id: str = field(default="", compare=False)  # id that the policy wrote; empty: it wrote none


class CallReader:
    """Reads the calls of one model's turns. Threads take turns."""

    def __init__(self, call_format: str, tokenizer: Any, ends: Collection[int] = ()) -> None:
        """ends: as of `choose_reader`.

        Raises: whatever vLLM's parser raises for a tokenizer without its control tokens.
        """
        self._lock = threading.Lock()
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager

        # The parsers log a stack trace for each text that is not a call. A policy in training writes many.
        logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
        logging.getLogger("vllm.parser").setLevel(logging.CRITICAL)
        self.call_format = call_format
        self._parser = ToolParserManager.get_tool_parser(call_format)(tokenizer)
        self._request = ChatCompletionRequest(messages=[], model="policy")
        self._ends = _control_names(tokenizer, ends)
        self._argument_tag: re.Pattern[str] | None = None  # begin or end of an argument; None: arguments are JSON
        self._known_call = ""  # call that the chat template wrote; empty: it writes none
        self._begins_in_thought = False  # True: the template opens a thought before the policy's turn
        marks = (getattr(self._parser, name, None) for name in ("bot_token", "tool_call_start_token"))
        self._openings = {mark for mark in marks if isinstance(mark, str) and mark}
        self._function_marks = _prepare_engine(self._parser)

    def learn(self, written: str, begins_in_thought: bool) -> None:
        """Take the first word of a well-formed call as the sign of a call, also of one that cannot be read."""
        self._known_call = written
        opening = written.partition(_PROBE_NAME)[0].split()
        self._openings |= set(opening[:1])
        if tags := re.search(rf"<([^<>/=\s]+)[^<>]*>\s*{_PROBE_ARGUMENTS['city']}\s*</\1>", written):
            self._argument_tag = re.compile(rf"<(/?){re.escape(tags[1])}\b")
        self._begins_in_thought = begins_in_thought

    def problem_of_tool(self, name: str, required: Collection[str]) -> str | None:
        """Return why no call of a tool is read; None: calls are read, or no known call shows it.

        In some formats names are words of a language: pythonic ones have no hyphen and no dot.
        required: names of the arguments that each call has.
        """
        call = self._known_call.replace(_PROBE_NAME, _MARK)
        for argument in ("city", *filter(_is_plain, required)) if call else ():
            known = call.replace("city", argument).replace(_MARK, name)
            if self.read(known)[1] != [Call(name, {argument: _PROBE_ARGUMENTS["city"]})]:
                what = f"{name!r}" if argument == "city" else f"{name!r} with its argument {argument!r}"
                problem = f"no call of the tool {what} could be read in the format {self.call_format}"
                return f"{problem}. Give it another name"
        return None

    async def read_async(self, text: str) -> tuple[str, list[Call]]:
        """Return `read(text)`. The event loop continues while a long text is read."""
        if len(text) < _LONG_TURN and not self._lock.locked():
            return self.read(text)
        return await asyncio.to_thread(self.read, text)

    def read(self, text: str) -> tuple[str, list[Call]]:
        """Return the text before a turn's calls, and the calls in order. Thoughts call nothing.

        A call that the parser cannot read has a problem; the turn's other calls stay.
        """
        thought, spoken = self._split_thoughts(text)
        spoken = spoken.rstrip()
        spoken = spoken.removesuffix(next((name for name in self._ends if spoken.endswith(name)), ""))
        content, calls = self._extract(_CALL_ID.sub("", spoken))
        if not calls and (places := self._places_of_openings(spoken)):
            # Parsers return no call of a turn with a broken one. So each call is read alone.
            pieces = [spoken[begin:end] for begin, end in zip(places, [*places[1:], len(spoken)], strict=True)]
            each = [self._extract(piece)[1] or [self._incomplete_call()] for piece in pieces[:_MAX_PIECES]]
            calls = [call for few in each for call in few]
            if not any(call.problem is None for call in calls):
                return text, calls[:1]
            content = spoken[: places[0]]
        if not calls:
            return text, []
        if self.call_format == "mistral" and len(ids := _WRITTEN_ID.findall(spoken)) == len(calls):
            calls = [replace(call, id=written) for call, written in zip(calls, ids, strict=True)]
        space = spoken[: len(spoken) - len(spoken.lstrip())]
        return (thought + space + content.lstrip()).strip(), calls

    def _split_thoughts(self, text: str) -> tuple[str, str]:
        """Return the turn's thoughts at its beginning, and the rest. The rest may name the end of a thought."""
        end, is_thinking = 0, self._begins_in_thought
        while is_thinking or text[end:].lstrip().startswith(_THOUGHT):
            is_thinking = False
            if (close := text.find(_THOUGHT_END, end)) < 0:
                break
            end = close + len(_THOUGHT_END)
        return text[:end], text[end:]

    def _places_of_openings(self, spoken: str) -> list[int]:
        """Return the places where calls begin. Adjacent openings are one place."""
        places: list[int] = []
        end = 0
        either = "|".join(map(re.escape, sorted(self._openings, key=len, reverse=True)))
        for found in re.finditer(either, spoken) if either else ():
            if not places or spoken[end : found.start()].strip():
                places.append(found.start())
            end = found.end()
        return places

    def _extract(self, spoken: str) -> tuple[str, list[Call]]:
        """Return the text before the calls, and the calls that vLLM's parser reads; none of a text that it refuses."""
        try:
            with self._lock:
                found = self._parser.extract_tool_calls(spoken, self._request)
        except Exception:  # parsers raise errors of their grammar
            return spoken, []
        if not found.tools_called:
            return spoken, []
        calls = [_call(each.function.name, each.function.arguments) for each in found.tool_calls]
        # Kimi K2 writes ids, which its template repeats in front of results. Other parsers make ids up.
        ids = (each.id if each.id and each.id in spoken else "" for each in found.tool_calls)
        calls = [replace(call, id=written) for call, written in zip(calls, ids, strict=True)]
        if self._has_cut_argument(spoken, calls):
            return spoken, [Call("", {}, "an argument contains a tag that ends arguments or calls")]
        if self._function_marks is not None:
            begin, close = spoken.rfind(self._function_marks[0]), max(map(spoken.rfind, self._function_marks[1:]))
            if begin > close:
                # The parser has completed the last call by itself: with the arguments so far, or with part of a name.
                calls[-1] = self._incomplete_call()
        return found.content or "", calls

    def _has_cut_argument(self, spoken: str, calls: Sequence[Call]) -> bool:
        """Return whether an end tag inside an argument has cut it: more ends than arguments, or two ends in a row."""
        tags = self._argument_tag.findall(spoken) if self._argument_tag is not None else []
        two_ends = any(pair == ("/", "/") for pair in itertools.pairwise(tags))
        return two_ends or tags.count("/") > sum(len(call.arguments) for call in calls)

    def _incomplete_call(self) -> Call:
        return Call("", {}, f"it is not a complete call in the format {self.call_format}")


def choose_reader(
    wanted: str, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None, ends: Collection[int] = ()
) -> CallReader:
    """Return the reader of a model's calls, proved with a call that its chat template wrote.

    wanted: tools.call_format: auto, or the name of a vLLM tool parser. A named format is trusted where the template
    writes no calls of earlier turns. template_kwargs: rollout.chat_template_kwargs, which may open a thought before
    each turn. ends: tokens that end a turn of the model, which its tokenizer may take for text.
    Raises: SettingsError with the reason and the change to make.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise SettingsError(
            "settings: policy.model has no chat template, which describes tools to a model. Use a model with one, "
            "or rollout.environment = single_turn."
        )
    _check_results(tokenizer)
    written, error = _written_probe(tokenizer)
    begins_in_thought = _begins_in_thought(tokenizer, template_kwargs or {})
    if wanted != "auto":
        reader = _named_reader(_OLD_NAMES.get(wanted, wanted), tokenizer, written, ends)
        reader.learn(written or "", begins_in_thought)
        return reader
    for name in _candidates() if written is not None else ():
        try:
            reader = CallReader(name, tokenizer, ends)
        except Exception:  # noqa: S112  a parser of another family lacks its control tokens in this vocabulary
            continue
        if _reads(reader, written or ""):
            reader.learn(written or "", begins_in_thought)
            return reader
    reason = "writes no call of an earlier turn"
    if written is not None:
        reason = f"writes a call that none of vLLM's parsers reads: {written.strip()[:200]!r}"
    elif error is not None:
        reason = f"cannot write a call of an earlier turn: {error}"
    raise SettingsError(
        f"settings: tools.call_format = auto, but the chat template of policy.model {reason}. Set tools.call_format to "
        f"the format that the model was trained on, such as {', '.join(USUAL_FORMATS)}."
    )


def _named_reader(name: str, tokenizer: Any, written: str | None, ends: Collection[int]) -> CallReader:
    if name not in _parser_names():
        raise SettingsError(
            f"settings: tools.call_format = {name}: vLLM has no such tool parser. It has {', '.join(_parser_names())}."
        )
    try:
        reader = CallReader(name, tokenizer, ends)
    except Exception as error:
        problem = f"vLLM's parser does not fit policy.model: {describe_error(error)}. Use auto"
        raise SettingsError(f"settings: tools.call_format = {name}: {problem}.") from error
    if written is not None and not _reads(reader, written):
        raise SettingsError(
            f"settings: tools.call_format = {name}: this format does not read the call that the chat template of "
            f"policy.model writes: {written.strip()[:200]!r}. Use auto."
        )
    return reader


def _reads(reader: CallReader, written: str) -> bool:
    """Return whether a reader gets the known call out of a rendered turn, and nothing else."""
    _, calls = reader.read(written)
    return calls == [Call(_PROBE_NAME, _PROBE_ARGUMENTS)]


def _written_probe(tokenizer: Any) -> tuple[str | None, str | None]:
    """Return (a known call as the chat template writes it; None: it writes none, the template's error)."""
    problem: str | None = None
    # Most templates take arguments as an object, some as JSON text.
    for arguments in (_PROBE_ARGUMENTS, json.dumps(_PROBE_ARGUMENTS)):
        function = {"name": _PROBE_NAME, "arguments": arguments}
        call = {"id": "call00000", "type": "function", "function": function}
        # The two turns have the same beginning. The rest of the second one is the call.
        turns = ({"content": "Zebra"}, {"content": "", "tool_calls": [call]})
        try:
            plain, calling = (_rendered_turn(tokenizer, turn) for turn in turns)
        except Exception as error:  # templates raise whatever jinja does
            problem = problem or describe_error(error)
            continue
        common = os.path.commonprefix([plain, calling])  # noqa: RUF071  texts, not paths
        if common.rfind("<") > common.rfind(">"):  # two control tokens have the same beginning
            common = common[: common.rfind("<")]
        written = calling[len(common) :]
        if _PROBE_NAME in written:
            return written, None
    return None, problem


def _begins_in_thought(tokenizer: Any, template_kwargs: Mapping[str, Any]) -> bool:
    """Return whether the template opens a thought before the policy's turn."""
    messages = [{"role": "user", "content": "Where is Paris?"}]
    try:
        prompt = str(
            tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **template_kwargs)
        )
    except Exception:  # templates raise whatever jinja does
        return False
    return prompt.rstrip().endswith(_THOUGHT)


def _check_results(tokenizer: Any) -> None:
    """Raise SettingsError for a template that omits the results of tools, as many templates without tools do."""
    call = {"id": "call00000", "type": "function", "function": {"name": _PROBE_NAME, "arguments": _PROBE_ARGUMENTS}}
    result = {"role": "tool", "name": _PROBE_NAME, "tool_call_id": "call00000", "content": "Giraffe"}
    asked = [{"role": "user", "content": "Zebra"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    try:
        text = str(tokenizer.apply_chat_template([*asked, result], tools=[_PROBE_TOOL], tokenize=False))
    except Exception:  # templates raise whatever jinja does, and will at the first result
        return
    if "Zebra" in text and "Giraffe" not in text:
        raise SettingsError(
            "settings: the chat template of policy.model omits the results of tools: the policy would never read them. "
            "Use a model whose template writes them, or put such a template into the model's folder."
        )


def _rendered_turn(tokenizer: Any, turn: dict[str, Any]) -> str:
    messages = [{"role": "user", "content": "Where is Paris?"}, {"role": "assistant", **turn}]
    return str(tokenizer.apply_chat_template(messages, tools=[_PROBE_TOOL], tokenize=False))


def _prepare_engine(parser: Any) -> list[str] | None:
    """Prepare a parser that is built on vLLM's streaming engine; return the begin and the ends of one of its calls.

    None: the parser has no such engine, or the format no tag for each function.
    """
    engine = getattr(parser, "_parser_engine", None)
    if engine is None:
        return None
    # For a stream, the engine converts all arguments so far at each "<" and ">": 20 kB of HTML took over 10 s.
    engine._stream_arg_deltas = False
    terminals = engine._engine.config.terminals
    marks = [terminals.get(name) for name in ("FUNC_PREFIX", "FUNC_END", "TOOL_END")]
    return marks if all(isinstance(mark, str) for mark in marks) else None


def required_of(tool: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the arguments that each call of a tool has. tool: in the form of chat completions."""
    parameters = tool["function"].get("parameters")
    required = parameters.get("required") if isinstance(parameters, Mapping) else None
    return tuple(name for name in required if isinstance(name, str)) if isinstance(required, list) else ()


def _is_plain(name: str) -> bool:
    """Return whether formats write a name as it is."""
    return json.dumps(name) == f'"{name}"' and not {"<", ">"} & {*name}


def _call(name: str, arguments: str) -> Call:
    """Return a call whose arguments are JSON, or JSON in a JSON text."""
    if not name:
        return Call("", {}, "it has no name")
    value: Any = arguments
    try:
        for _ in range(2):
            value = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        return Call(name, {}, "its arguments are not a JSON object")
    return Call(name, value)


def _control_names(tokenizer: Any, ends: Collection[int]) -> set[str]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {str(token.content) for index, token in added.items() if token.special or index in ends}
    return special | set(map(str, getattr(tokenizer, "all_special_tokens", ())))


def _candidates() -> Iterable[str]:
    yield from USUAL_FORMATS
    yield from (name for name in _parser_names() if name not in USUAL_FORMATS)


def _parser_names() -> list[str]:
    from vllm.tool_parsers import ToolParserManager

    return sorted(ToolParserManager.list_registered())
