"""The texts of a row, with a loss weight each: messages as the model's chat template writes them, its end tokens."""

import json
import re
from collections.abc import Collection
from contextlib import suppress
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from learner.data.sft_forms import BadRowError, Chat, Completion, Messages, Segments
from protocol.message_texts import render_chat
from protocol.one_line import one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_EARLIER_CHANGES = "writes earlier messages in another way once later ones follow"
_START_CHANGES = "begins a whole answer in another way than one that it asks for"


class Place(Enum):
    """Where a segment is in its row. Many tokenizers put a space before the first word of a text."""

    START = 0  # the row begins with it, behind the tokenizer's own prefix (BOS)
    RENDERED = 1  # the row begins with it; a chat template wrote the prefix
    BEHIND = 2  # behind other text


class Segment(NamedTuple):
    """A part of a row with one loss weight."""

    text: str  # encoded separately
    weight: float  # loss weight of each token
    place: Place = Place.BEHIND


def segments_of(
    content: Segments | Chat | Completion, tokenizer: "PreTrainedTokenizerBase", ends: Collection[int] = ()
) -> list[Segment]:
    """Return a row's segments. ends: tokens that end a turn of the model, besides special ones."""
    if isinstance(content, Chat):
        return _chat_segments(content, tokenizer, ends)
    if isinstance(content, Completion):
        return _completion_segments(content, tokenizer, ends)
    (text, weight), *others = content.parts or [("", 0.0)]
    return [Segment(text, weight, _start_of(text, tokenizer)), *(Segment(*part) for part in others)]


def _start_of(text: str, tokenizer: "PreTrainedTokenizerBase") -> Place:
    bos = str(tokenizer.bos_token or "")
    # A chat template's text begins with BOS already.
    return Place.RENDERED if bos and text.startswith(bos) else Place.START


def _completion_segments(
    content: Completion, tokenizer: "PreTrainedTokenizerBase", ends: Collection[int]
) -> list[Segment]:
    prompt, place = content.prompt, Place.RENDERED
    if isinstance(prompt, str):
        place, end = _start_of(prompt, tokenizer), str(tokenizer.eos_token or "")
        # A text that a template has written ends so already.
        last = [] if end and content.response.rstrip().endswith(end) else [Segment(end, 1.0)]
    else:
        messages, prompt = prompt, _render(prompt, content.tools, tokenizer, add_generation_prompt=True)
        _check_written(messages, content.tools, prompt)
        last = (
            []
            if _ends_turn(content.response, tokenizer, ends)
            else [Segment(_end_behind(messages, tokenizer, ends), 1.0)]
        )
    if not prompt:
        return [Segment(content.response, 1.0, _start_of(content.response, tokenizer)), *last]
    return [Segment(prompt, 0.0, place), Segment(content.response, 1.0), *last]


def _end_behind(messages: Messages, tokenizer: "PreTrainedTokenizerBase", ends: Collection[int]) -> str:
    """Return what the chat template writes behind an answer, with an end token in any case."""
    end = _written_behind(messages, tokenizer)
    return end if _ends_turn(end, tokenizer, ends) else f"{end}{tokenizer.eos_token or ''}"


def _written_behind(messages: Messages, tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return what the chat template writes behind an answer to the messages; empty if it takes none."""
    answer = "\ue000"
    with suppress(BadRowError):
        whole = _render([*messages, {"role": "assistant", "content": answer}], None, tokenizer)
        return whole.rpartition(answer)[2] if answer in whole else ""
    return ""


def end_not_in(ends: Collection[int], tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """Return the special token with which the chat template ends an answer; None if the end has one of `ends`."""
    end = _written_behind([{"role": "user", "content": "a"}], tokenizer).rstrip()
    tokens = tokenizer.encode(end, add_special_tokens=False) if end else []
    last = tokenizer.added_tokens_decoder.get(tokens[-1]) if tokens else None
    return tokens[-1] if last is not None and last.special and set(tokens).isdisjoint(ends) else None


def _chat_segments(content: Chat, tokenizer: "PreTrainedTokenizerBase", ends: Collection[int]) -> list[Segment]:
    """Return the rendered conversation, split where messages of the loss begin and end."""
    segments: list[Segment] = []
    done, messages = "", content.messages
    for i, of_message in enumerate(content.weights):
        if not of_message:
            continue
        whole = _render(messages[: i + 1], content.tools, tokenizer)
        asked = (
            _render(messages[:i], content.tools, tokenizer, add_generation_prompt=True)
            if i
            else _first_header(whole, tokenizer)
        )
        for until, weight, changed in ((asked, 0.0, _EARLIER_CHANGES), (whole, of_message, _START_CHANGES)):
            if not until.startswith(done):
                raise BadRowError(f'messages[{i}]: the model\'s chat template {changed}. Give the row as "segments"')
            segments.append(Segment(until[len(done) :], weight, Place.BEHIND if done else Place.RENDERED))
            done = until
        _check_message(i, messages[i], segments[-1].text)
    if not segments:
        raise BadRowError("has no message to learn: each one of the assistant has loss: false or the weight 0")
    num = max(i for i, weight in enumerate(content.weights) if weight) + 1
    _check_written(messages[:num], content.tools, done)
    if content.weights[-1] and not _ends_turn(done, tokenizer, ends):
        segments.append(Segment(str(tokenizer.eos_token or ""), content.weights[-1]))
    return segments


def _first_header(whole: str, tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return the start of a conversation that begins with an answer, which the model does not write."""
    asked = [{"role": "user", "content": "a"}]
    bare, opened = (_render(asked, None, tokenizer, add_generation_prompt=each) for each in (False, True))
    before, header, _ = whole.partition(opened.removeprefix(bare)) if bare != opened else ("", "", "")
    if not header:
        raise BadRowError("messages[0]: the chat template does not show where this first answer begins. Give segments")
    return before + header


def _ends_turn(text: str, tokenizer: "PreTrainedTokenizerBase", ends: Collection[int]) -> bool:
    """Return whether a rendered answer ends with a special token or one of `ends`.

    Without one the model would not learn to stop.
    """
    added = tokenizer.added_tokens_decoder.items()
    names = [tokenizer.eos_token, *(str(each) for token, each in added if each.special or token in ends)]
    return text.rstrip().endswith(tuple(str(name) for name in names if name))


def _check_written(messages: Messages, tools: list[Any] | None, text: str) -> None:
    """Raise BadRowError for a message or a tool that the chat template leaves out. Earlier reasoning may be."""
    for i, message in enumerate(messages):
        said = re.sub(r"<think>.*?</think>", "", str(message.get("content") or ""), flags=re.DOTALL)
        _refuse_left_out(f"messages[{i}].content of the role {message['role']!r}", said, text)
        _check_calls(i, message, text)
    for tool in tools or []:
        function = tool.get("function", tool) if isinstance(tool, dict) else {}
        _refuse_left_out("tools", function.get("name"), text)


def _check_message(i: int, message: dict[str, Any], text: str) -> None:
    """Raise BadRowError for a part of a learnt message that the chat template leaves out."""
    for key in ("content", "reasoning_content", "reasoning", "thinking"):
        _refuse_left_out(f"messages[{i}].{key}", message.get(key), text)
    _check_calls(i, message, text)


def _check_calls(i: int, message: dict[str, Any], text: str) -> None:
    for call in message.get("tool_calls") or []:
        function = call.get("function", call) if isinstance(call, dict) else {}
        called = [function.get("name"), function.get("arguments")]
        _refuse_left_out(f"messages[{i}].tool_calls", called, text)


def _refuse_left_out(name: str, said: Any, text: str) -> None:
    if (word := left_out(said, text)) is not None:
        raise BadRowError(f'{name}: the model\'s chat template leaves out {word!r}. Remove it, or give "segments"')


def left_out(said: Any, text: str) -> str | None:
    """Return a word of a message's text or JSON value that a rendered text lacks; None: all are in it."""
    known = text.casefold()
    words = {*_words(known), *(() if isinstance(said, str) else ("null",))}  # some templates write no null
    said = said if isinstance(said, str) else json.dumps(said, ensure_ascii=False) if said else ""
    # A template may write a word directly behind another one.
    return next((word for word in _words(said.casefold()) if word not in words and word not in known), None)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", re.sub(r"\\[nrtu]", " ", text))


def _render(
    messages: Messages,
    tools: list[Any] | None,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    add_generation_prompt: bool = False,
) -> str:
    if not tokenizer.chat_template:
        raise BadRowError('has chat messages, and the model has no chat template. Give "segments", or text')

    options: dict[str, Any] = {"tools": tools, "add_generation_prompt": add_generation_prompt}
    try:
        return str(render_chat(tokenizer, messages, tokenize=False, **options))
    except Exception as error:  # templates raise whatever jinja does
        raise BadRowError(f"cannot be written by the model's chat template: {one_line(error)}") from error
