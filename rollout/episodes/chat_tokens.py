"""From text to tokens, with trusted text, which may contain control tokens, separate from untrusted text.

A tokenizer turns the name of a control token (end of text, start of a turn) into the token, in any text. So each text
is one of two:

    trusted     the model's chat template; a prompt that is one string; an observation's head and tail
    untrusted   contents of chat messages, descriptions of tools, an observation's body: passages, output of tools,
                columns of a row

Only trusted text makes control tokens. In untrusted text their names stay letters. A text without such a name, and
without the beginning of one at its end, has the tokenizer's own tokens.
"""

import os.path
import re
import unicodedata
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from protocol.errors import NeighbourError
from protocol.message_texts import (
    ContentError,
    check_template_kwargs,
    render_chat,
    render_prompt,
    strings_of,
    with_strings,
    with_texts,
)
from protocol.one_line import one_line
from rollout.environments.base import Chat, Messages, Observation, Prompt, RenderedText
from rollout.environments.guard import ENVIRONMENT

PROMPT = "prompt"
# Characters of Unicode's private use. One that no message contains marks the place where a name is cut.
_MARKS = [chr(code) for code in range(0xE000, 0xF8FF)]
_WORD = "zebra"  # content of messages that show whether the template writes them
_ENDLESS = "its messages hold endlessly nested lists or objects"
# Tokens left free when a reply is cut, by attempt.
_SPARES = (0, 4, 16, 64)
# Letters that no tokenizer's normalisation changes, except for case and white space.
_ASCII = re.compile(r"[\t\n\r -~]*")
# Signs of a space in the pieces of many tokenizers.
_SPACES = " ▁"


class ChatTokens:
    """Tokens of prompts and observations for one model. Raises NeighbourError for texts that it cannot encode."""

    def __init__(
        self, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None, ends: Collection[int] = ()
    ) -> None:
        """tokenizer: the model's Hugging Face tokenizer. template_kwargs: rollout.chat_template_kwargs.

        ends: as in `control_tokens`. Raises: SettingsError for variables that the chat template does not read.
        """
        self._tokenizer = tokenizer
        self._template_kwargs = dict(template_kwargs or {})
        check_template_kwargs(tokenizer, self._template_kwargs)
        self._names = ControlNames(tokenizer, lambda text: self._encode(text, PROMPT), ends)
        self._control = self._names.ids
        # Whether the template omits messages, by boundary, calls in front of them, and roles.
        self._omitted: dict[tuple[str, bool, tuple[str, ...]], bool] = {}

    def prompt(self, prompt: Prompt) -> list[int]:
        """Return a prompt's tokens: of a text by the tokenizer's defaults, of messages by the model's template.

        A RenderedText, and a text that begins with the name of the first token, get no further special tokens.

        Raises: NeighbourError("prompt") when the template or the tokenizer refuses it.
        """
        if isinstance(prompt, str):
            first = str(getattr(self._tokenizer, "bos_token", None) or "")
            is_whole = isinstance(prompt, RenderedText) or (first != "" and prompt.startswith(first))
            tokens = self._encode(prompt, PROMPT, add_special_tokens=not is_whole)
            if is_whole or tokens[-1:] != [getattr(self._tokenizer, "eos_token_id", None)]:
                return tokens
            # Some tokenizers also end each text, which the policy continues.
            text = self._encode(prompt, PROMPT, add_special_tokens=False)
            ends = [end for end in range(len(text), len(tokens)) if tokens[end - len(text) : end] == text]
            return tokens[: ends[0]] if ends else tokens
        chat = prompt if isinstance(prompt, Chat) else Chat(prompt, [])
        chat = Chat(_with_texts(chat.messages, PROMPT), chat.tools)
        try:
            has_names = any(self._names.occur_in(text) for text in strings_of([chat.messages, chat.tools]))
            self._check_written([], chat.messages, chat.tools, PROMPT)
            if has_names:
                return self._prompt_with_names(chat)
            return self._encode(self._render(chat, PROMPT), PROMPT)
        except RecursionError:
            raise NeighbourError(PROMPT, _ENDLESS) from None

    def reply(
        self, messages: Messages, tools: list[dict[str, Any]], last_token: int, max_tokens: int
    ) -> tuple[list[int], bool]:
        """Return the tokens of chat messages between two turns of the policy, and whether contents were cut to fit.

        The template ends the policy's turn, unless the policy did, and opens the next one. Its own text is never cut.
        Contents that do not fit share the room; the shortest stay whole. tools: the prompt's. last_token: the policy's
        last token. Raises: NeighbourError("environment") when the template refuses the messages.
        """
        messages = _with_texts(messages, ENVIRONMENT)
        try:
            tokens = self._encode_reply(messages, tools, last_token)
            if len(tokens) <= max_tokens:
                return tokens, False
            contents = [self._encode(text, ENVIRONMENT) if (text := _content(each)) else [] for each in messages]
            empty = [{**each, "content": ""} if _content(each) else each for each in messages]
            room = max_tokens - len(self._encode_reply(empty, tools, last_token))
            # A part alone may have more tokens than within the whole. Then retry with less room.
            for spare in _SPARES:
                kept = _shared_room(list(map(len, contents)), room - spare)
                cut = [self._cut_to(*each) for each in zip(messages, contents, kept, strict=True)]
                if len(tokens := self._encode_reply(cut, tools, last_token)) <= max_tokens:
                    return tokens, True
            return self._encode_reply(empty, tools, last_token), True
        except RecursionError:
            raise NeighbourError(ENVIRONMENT, _ENDLESS) from None

    def _cut_to(self, message: dict[str, Any], content: list[int], num_tokens: int) -> dict[str, Any]:
        """Return the message, cut to num_tokens tokens of content."""
        if len(content) <= num_tokens:
            return message
        # The last character may be incomplete.
        return {**message, "content": self._tokenizer.decode(content[:num_tokens]).rstrip("\ufffd")}

    def _encode_reply(self, messages: Messages, tools: list[dict[str, Any]], last_token: int) -> list[int]:
        """Return the tokens that the template writes between a turn of the assistant and the next one."""
        strings = list(strings_of([messages, tools]))
        turn_mark, name_mark = _marks_outside(strings, ENVIRONMENT)
        if any(self._names.occur_in(text) for text in strings):
            messages, tools = self._with_cut_strings([messages, tools], strings, name_mark, ENVIRONMENT)
        behind = self._behind(turn_mark, messages, tools)
        if last_token in self._control:  # the policy ended its turn itself
            behind = self._names.without_ending(behind, last_token)
        return self._in_pieces(behind.split(name_mark), ENVIRONMENT)

    def _behind(self, mark: str, messages: Messages, tools: list[dict[str, Any]]) -> str:
        """Return the text that the template writes with these messages behind a turn. mark: stands for the turn."""
        asked: dict[str, Any] = {"role": "user", "content": "?"}
        turns = [asked, {"role": "assistant", "content": mark}]
        calls = [_call_of(message) for message in messages if message["role"] == "tool"]
        if not calls or not self._omits(turns, messages, tools, ENVIRONMENT):
            _, found, behind = self._render(Chat(turns + messages, tools), ENVIRONMENT).partition(mark)
            if not found or mark in behind:
                raise NeighbourError(ENVIRONMENT, "the model's chat template does not render a turn once and unchanged")
            self._check_written(turns, messages, tools, ENVIRONMENT)
            return behind
        # Gemma 4's writes results behind their calls only, in the same turn.
        turns = [asked, {"role": "assistant", "content": "", "tool_calls": calls}]
        self._check_written(turns, messages, tools, ENVIRONMENT)
        without, whole = (self._render(Chat(turns + more, tools), ENVIRONMENT) for more in ([], messages))
        common = os.path.commonprefix([without, whole])  # noqa: RUF071  texts, not paths
        return self._names.ending_of(common) + whole[len(common) :]

    def _check_written(self, turns: Messages, messages: Messages, tools: list[dict[str, Any]], boundary: str) -> None:
        """Raise NeighbourError for messages that the template omits."""
        if self._omits(turns, messages, tools, boundary):
            roles = ", ".join(str(message["role"]) for message in messages)
            raise NeighbourError(boundary, f"the model's chat template omits one of the messages: {roles[:200]}")

    def _omits(self, turns: Messages, messages: Messages, tools: list[dict[str, Any]], boundary: str) -> bool:
        """Return whether the template omits one of the messages, or moves it in front of the turns before them."""
        roles = tuple(str(message["role"]) for message in messages)
        has_calls = bool(turns and turns[-1].get("tool_calls"))
        if (key := (boundary, has_calls, roles)) not in self._omitted:
            words = [each if each["role"] == "assistant" else {**each, "content": _WORD} for each in messages]
            text = self._render(Chat(turns + words, tools), boundary)
            behind = text.partition(turns[-1]["content"])[2] if turns and not has_calls else text
            self._omitted[key] = behind.count(_WORD) < len(roles) - roles.count("assistant")
        return self._omitted[key]

    def observation(self, observation: Observation, max_tokens: int) -> tuple[list[int], bool]:
        """Return an observation's tokens, and whether the end of its body was cut to fit into max_tokens.

        It is tokenised as one piece if it fits and its body names no control token. Head and tail are never cut.
        """
        tokens = self._encode_observation(observation)
        if len(tokens) <= max_tokens:
            return tokens, False
        head = self._encode(observation.head, ENVIRONMENT)
        tail = self._encode(observation.tail, ENVIRONMENT)
        body = self._encode_untrusted(observation.body)[: max(0, max_tokens - len(head) - len(tail))]
        return head + body + tail, True

    def _encode_observation(self, observation: Observation) -> list[int]:
        whole = self._encode(observation.text, ENVIRONMENT)
        if self._control.isdisjoint(whole):
            return whole
        head = self._encode(observation.head, ENVIRONMENT)
        tail = self._encode(observation.tail, ENVIRONMENT)
        if self._controls_of(whole) == self._controls_of(head + tail):
            return whole
        return head + self._encode_untrusted(observation.body) + tail

    def _encode_untrusted(self, text: str) -> list[int]:
        """Return a text's tokens without control tokens."""
        tokens = self._encode(text, ENVIRONMENT)
        if not self._control.isdisjoint(tokens):
            mark, _ = _marks_outside([text], ENVIRONMENT)
            tokens = self._in_pieces(self._names.cut(text, mark).split(mark), ENVIRONMENT)
        if self._control.isdisjoint(tokens):
            return tokens
        problem = "holds the name of a control token, and the tokenizer always turns it into the token"
        raise NeighbourError(ENVIRONMENT, f"its observation {problem}")

    def _prompt_with_names(self, chat: Chat) -> list[int]:
        """Return the tokens of messages that contain names of control tokens.

        A mark cuts each name in two before rendering. The rendered text is encoded in pieces between the marks. So only
        the template's own names are whole.
        """
        strings = list(strings_of([chat.messages, chat.tools]))
        mark, _ = _marks_outside(strings, PROMPT)
        marked = Chat(*self._with_cut_strings([chat.messages, chat.tools], strings, mark, PROMPT))
        return self._in_pieces(self._render(marked, PROMPT).split(mark), PROMPT)

    def _with_cut_strings(self, value: Any, strings: Sequence[str], mark: str, boundary: str) -> Any:
        """Return messages and tools with every name in their strings cut in two by a mark."""
        cut = {text: self._names.cut(text, mark) for text in strings}
        if any(not self._control.isdisjoint(self._in_pieces(text.split(mark), boundary)) for text in cut.values()):
            raise NeighbourError(boundary, "a message holds the name of a control token that cannot be cut")
        return with_strings(value, cut.__getitem__)

    def _in_pieces(self, pieces: Sequence[str], boundary: str) -> list[int]:
        """Return the tokens of the pieces, each encoded alone."""
        # Equal pieces are encoded once: hostile text repeats a name many times.
        tokens = {piece: self._encode(piece, boundary) for piece in dict.fromkeys(pieces) if piece}
        return [token for piece in pieces if piece for token in tokens[piece]]

    def _controls_of(self, tokens: Sequence[int]) -> list[int]:
        return [token for token in tokens if token in self._control]

    def _encode(self, text: str, boundary: str, add_special_tokens: bool = False) -> list[int]:
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))
        except Exception as error:  # tokenizers raise Exception itself
            raise NeighbourError(boundary, f"the tokenizer cannot encode it: {one_line(error)}") from error

    def _render(self, chat: Chat, boundary: str) -> str:
        options: dict[str, Any] = {"tools": chat.tools} if chat.tools else {}
        try:
            if boundary == PROMPT:
                return render_prompt(self._tokenizer, chat.messages, **options, **self._template_kwargs)
            options |= {"tokenize": False, "add_generation_prompt": True}
            return str(render_chat(self._tokenizer, chat.messages, **options, **self._template_kwargs))
        except Exception as error:  # templates raise whatever jinja does
            raise NeighbourError(boundary, f"the model's chat template refuses it: {one_line(error)}") from error


def _with_texts(messages: Messages, boundary: str) -> Messages:
    try:
        return with_texts(messages)
    except ContentError as error:
        raise NeighbourError(boundary, str(error)) from None


def _call_of(result: dict[str, Any]) -> dict[str, Any]:
    """Return the call that a result answers, without its arguments."""
    function: dict[str, Any] = {"name": result.get("name") or "unknown", "arguments": {}}
    return {"id": result.get("tool_call_id") or "", "type": "function", "function": function}


def _content(message: dict[str, Any]) -> str:
    """Return a message's content if it is one text, otherwise ""."""
    content = message.get("content")
    return content if isinstance(content, str) else ""


def _shared_room(lengths: Sequence[int], room: int) -> list[int]:
    """Return the kept part of each length. The sum is at most `room`, and the shortest stay whole.

    Example: _shared_room([2, 10, 20], 12) == [2, 5, 5]
    """
    kept = [0] * len(lengths)
    room = max(room, 0)
    shortest_first = sorted(range(len(lengths)), key=lambda index: lengths[index])
    for place, index in enumerate(shortest_first):
        kept[index] = min(lengths[index], room // (len(lengths) - place))
        room -= kept[index]
    return kept


def _marks_outside(texts: Sequence[str], boundary: str) -> tuple[str, str]:
    """Return two characters that no text contains. Raises: NeighbourError(boundary) when fewer are left."""
    free = (mark for mark in _MARKS if not any(mark in text for text in texts))
    if (first := next(free, None)) and (second := next(free, None)):
        return first, second
    raise NeighbourError(boundary, f"its texts use up the {len(_MARKS)} characters that Unicode leaves free")


class ControlNames:
    """The names of one tokenizer's control tokens, such as `<|im_end|>`, and searches for them.

    `occur_in` finds them as the tokenizer would. `cut` breaks them with a mark, so that they are tokenized as plain
    text. A tokenizer may normalise a text before it searches: change its case, narrow wide letters, omit letters.
    """

    ids: frozenset[int]

    def __init__(self, tokenizer: Any, encode: Callable[[str], list[int]], ends: Collection[int] = ()) -> None:
        """encode: returns a text's tokens, control tokens included. ends: as in `control_tokens`."""
        control = control_tokens(tokenizer, ends)
        self.ids = frozenset(control)
        self._encode = encode
        self._normalise = _normaliser_of(tokenizer)
        names = {form for name in control.values() for form in self._forms(name)}
        longest_first = sorted((name for name in names if len(name) > 1), key=len, reverse=True)
        # Some tokenizers match names in any case. For others a cut is harmless.
        any_name = "|".join(map(_pattern, longest_first)) or r"(?!)"  # (?!) matches nothing
        self._names = re.compile(any_name, re.IGNORECASE)
        self._leading_name = re.compile(rf"\s*(?:{any_name})")
        self._last_name = re.compile(rf"(?:{any_name})\Z")
        self._beginnings = {name[:end].lower() for name in names for end in range(1, len(name))}
        self._longest = max(map(len, names), default=1)

    def occur_in(self, text: str) -> bool:
        """Return whether the tokenizer finds a name in the text, or could find one once more text follows."""
        if self._names.search(text) or self._begun(text) or self._begun(self._normalise(text)):
            return True
        return not _ASCII.fullmatch(text) and self._is_found(text)

    def cut(self, text: str, mark: str) -> str:
        """Return the text with a mark in each name, and in the beginning of a name at its end.

        If the tokenizer finds names in other letters, they become plain letters. The caller must refuse a text in which
        the tokenizer still finds a name between the marks.
        """
        changed = text
        for normalise in (lambda text: text, lambda text: unicodedata.normalize("NFKC", text), self._normalise):
            changed = self._insert_marks(normalise(text), mark)
            pieces = changed.split(mark)
            if not self._begun(self._normalise(pieces[-1])) and not any(map(self._is_found, set(pieces))):
                break
        return changed

    def ending_of(self, text: str) -> str:
        """Return the name at the text's end; "": the text does not end with one."""
        return found[0] if (found := self._last_name.search(text)) is not None else ""

    def without_ending(self, text: str, last_token: int) -> str:
        """Return the text behind a turn without the names that end the turn. last_token: the turn's last token.

        A template may end a turn with several names. The turn has all of them up to its last token.
        """
        end, first_end = 0, None
        while (name := self._leading_name.match(text, end)) is not None:
            end = name.end()
            first_end = end if first_end is None else first_end
            if self._encode(name[0].strip()) == [last_token]:
                return text[end:]
        return text[first_end or 0 :]

    def _insert_marks(self, text: str, mark: str) -> str:
        text = self._names.sub(lambda name: f"{name[0][0]}{mark}{name[0][1:]}", text)
        if not (length := self._begun(text)):
            return text
        place = len(text.rstrip()) - length + 1
        return text[:place] + mark + text[place:]

    def _begun(self, text: str) -> int:
        """Return the number of a name's letters at the text's end. A template may trim it and append text."""
        tail = text.rstrip()[-self._longest :].lower()
        return next((len(tail) - at for at in range(len(tail)) if tail[at:] in self._beginnings), 0)

    def _is_found(self, text: str) -> bool:
        return bool(text) and not self.ids.isdisjoint(self._encode(text))

    def _forms(self, name: str) -> Iterator[str]:
        """Yield a name and its forms after the tokenizer's normalisation."""
        yield from (name, unicodedata.normalize("NFKC", name), self._normalise(name).strip(_SPACES))


def _pattern(name: str) -> str:
    return "".join(rf"[\s{_SPACES}]+" if letter in _SPACES else re.escape(letter) for letter in name)


def _normaliser_of(tokenizer: Any) -> Callable[[str], str]:
    """Return the tokenizer's normalisation; the identity if it has none."""
    normaliser = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    return normaliser.normalize_str if normaliser is not None else lambda text: text


def control_tokens(tokenizer: Any, ends: Collection[int] = ()) -> dict[int, str]:
    """Return id and name of each control token. The token for unknown text is not one.

    ends: tokens that end a turn of the model. An added token among them is a control token, even if its tokenizer does
    not say so: rewards would read its name, and the template would end the turn a second time. A tag such as
    `</tool_call>` stays text, which is read.
    """
    ids = getattr(tokenizer, "all_special_ids", ())
    control = dict(zip(ids, getattr(tokenizer, "all_special_tokens", ()), strict=True))
    for token, added in getattr(tokenizer, "added_tokens_decoder", {}).items():
        if added.special or (token in ends and not added.content.startswith("</")):
            control[token] = added.content
    unknown = getattr(tokenizer, "unk_token_id", None)
    others = [getattr(tokenizer, f"{kind}_token_id", None) for kind in ("bos", "eos", "pad", "sep", "cls", "mask")]
    if unknown not in others:
        control.pop(unknown, None)
    return control
