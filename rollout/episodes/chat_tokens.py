"""The one way from text to tokens here, with what may speak in control tokens kept apart from what may not.

A tokenizer makes a control token (end of text, start of a turn) of its mere name, wherever the name stands. So each
text is one of two:

    trusted     the model's chat template; a prompt that is one string; an observation's head and tail
    untrusted   what stands in chat messages; an observation's body: passages, tools' output, columns of a row

Control tokens come from trusted text alone. In untrusted text their names stay what they are, letters. A text that
holds no such name has the tokens that the tokenizer gives it as a whole.
"""

import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from protocol.errors import NeighbourError
from protocol.one_line import one_line
from rollout.environments.base import Observation, Prompt
from rollout.environments.guard import ENVIRONMENT

PROMPT = "prompt"
# Characters of Unicode's private use, one of which stands in no message: it marks where a name is cut in two.
_MARKS = [chr(code) for code in range(0xE000, 0xF8FF)]

# No tokenizer's normalisation makes other letters of these, but for their case.
_ASCII = re.compile(r"[\t\n\r -~]*")


class ChatTokens:
    """Tokens of prompts and observations for one model. A text that it cannot encode is a NeighbourError."""

    def __init__(self, tokenizer: Any) -> None:
        """tokenizer: the model's Hugging Face tokenizer."""
        self._tokenizer = tokenizer
        control = _control_tokens(tokenizer)
        self._control = frozenset(control)
        names = sorted((name for name in control.values() if len(name) > 1), key=len, reverse=True)
        # Some tokenizers match names in any case; one that does not loses nothing by a name cut for its case.
        self._names = re.compile("|".join(map(re.escape, names)) or r"(?!)", re.IGNORECASE)

    def prompt(self, prompt: Prompt) -> list[int]:
        """Return a prompt as tokens: text as the tokenizer takes it by default, messages by the model's template.

        Raises: NeighbourError("prompt") when the template or the tokenizer refuses it.
        """
        if isinstance(prompt, str):
            return self._encode(prompt, PROMPT, add_special_tokens=True)
        try:
            if any(self._holds_name(text) for text in _strings(prompt)):
                return self._prompt_with_names(prompt)
            return list(self._templated(prompt, tokenize=True))
        except RecursionError:
            raise NeighbourError(PROMPT, "its messages hold lists or objects in one another without end") from None

    def observation(self, observation: Observation, max_tokens: int) -> tuple[list[int], bool]:
        """Return an observation as tokens, and whether the end of its body was cut to fit into max_tokens.

        Tokenised as one piece where it fits and its body names no control token. Head and tail are never cut.
        """
        tokens = self._observed(observation)
        if len(tokens) <= max_tokens:
            return tokens, False
        head = self._encode(observation.head, ENVIRONMENT)
        tail = self._encode(observation.tail, ENVIRONMENT)
        body = self._untrusted(observation.body)[: max(0, max_tokens - len(head) - len(tail))]
        return head + body + tail, True

    def _observed(self, observation: Observation) -> list[int]:
        whole = self._encode(observation.text, ENVIRONMENT)
        if self._control.isdisjoint(whole):
            return whole
        head = self._encode(observation.head, ENVIRONMENT)
        tail = self._encode(observation.tail, ENVIRONMENT)
        if self._controls_of(whole) == self._controls_of(head + tail):
            return whole
        return head + self._untrusted(observation.body) + tail

    def _untrusted(self, text: str) -> list[int]:
        """Return a text's tokens, none of which is a control token."""
        tokens = self._encode(text, ENVIRONMENT)
        for way in (self._without_special, self._with_cut_names):
            if self._control.isdisjoint(tokens):
                return tokens
            tokens = way(text, tokens)
        if self._control.isdisjoint(tokens):
            return tokens
        problem = "holds the name of a control token, which the tokenizer does not tell from the token itself"
        raise NeighbourError(ENVIRONMENT, f"its observation {problem}")

    def _without_special(self, text: str, tokens: list[int]) -> list[int]:
        """Return the tokens of a text in which the tokenizer looks for no names; `tokens` where it cannot do so."""
        try:
            return self._encode(text, ENVIRONMENT, split_special_tokens=True)
        except NeighbourError:
            return tokens

    def _with_cut_names(self, text: str, tokens: list[int]) -> list[int]:
        mark = _mark_outside([text])
        return self._in_pieces(self._cut_names(text, mark).split(mark), ENVIRONMENT)

    def _prompt_with_names(self, messages: Sequence[Any]) -> list[int]:
        """Return messages, in which names of control tokens stand, by the model's template.

        Each name is cut in two by a mark before the template sees it. The rendered text is encoded in the pieces
        between the marks, so that no piece holds a name that the template did not write.
        """
        strings = list(_strings(messages))
        mark = _mark_outside(strings)
        cut = [self._cut_names(text, mark) for text in strings]
        if any(not self._control.isdisjoint(self._in_pieces(text.split(mark), PROMPT)) for text in cut):
            raise NeighbourError(PROMPT, "a message holds the name of a control token that cannot be cut out of it")
        marked = _with_strings(messages, lambda text: self._cut_names(text, mark))
        return self._in_pieces(str(self._templated(marked, tokenize=False)).split(mark), PROMPT)

    def _holds_name(self, text: str) -> bool:
        """Return whether the tokenizer finds a control token's name in text: as it stands, or once normalised."""
        if self._names.search(text):
            return True
        return not _ASCII.fullmatch(text) and not self._control.isdisjoint(self._encode(text, PROMPT))

    def _cut_names(self, text: str, mark: str) -> str:
        def cut(text: str) -> str:
            return self._names.sub(lambda name: f"{name[0][0]}{mark}{name[0][1:]}", text)

        if self._control.isdisjoint(self._in_pieces(cut(text).split(mark), PROMPT)):
            return cut(text)
        # A tokenizer that normalises finds names in other letters too, full-width ones for instance.
        return cut(unicodedata.normalize("NFKC", text))

    def _in_pieces(self, pieces: Sequence[str], boundary: str) -> list[int]:
        return [token for piece in pieces if piece for token in self._encode(piece, boundary)]

    def _controls_of(self, tokens: Sequence[int]) -> list[int]:
        return [token for token in tokens if token in self._control]

    def _encode(self, text: str, boundary: str, add_special_tokens: bool = False, **options: bool) -> list[int]:
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens, **options))
        except Exception as error:  # tokenizers raise Exception itself
            raise NeighbourError(boundary, f"the tokenizer cannot encode it: {one_line(error)}") from error

    def _templated(self, messages: Sequence[Any], tokenize: bool) -> Any:
        try:
            return self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=tokenize, return_dict=False
            )
        except Exception as error:  # templates raise whatever jinja does
            raise NeighbourError(PROMPT, f"the model's chat template refuses it: {one_line(error)}") from error


def _control_tokens(tokenizer: Any) -> dict[int, str]:
    """Return id and name of each control token. What stands for unknown text is none: it says nothing to a model."""
    ids = getattr(tokenizer, "all_special_ids", ())
    control = dict(zip(ids, getattr(tokenizer, "all_special_tokens", ()), strict=True))
    for token, added in getattr(tokenizer, "added_tokens_decoder", {}).items():
        if added.special:
            control[token] = added.content
    unknown = getattr(tokenizer, "unk_token_id", None)
    others = [getattr(tokenizer, f"{kind}_token_id", None) for kind in ("bos", "eos", "pad", "sep", "cls", "mask")]
    if unknown not in others:
        control.pop(unknown, None)
    return control


def _mark_outside(texts: Sequence[str]) -> str:
    """Return a character that stands in none of the texts."""
    for mark in _MARKS:
        if not any(mark in text for text in texts):
            return mark
    raise NeighbourError(PROMPT, f"its texts hold every one of the {len(_MARKS)} characters that Unicode leaves free")


def _strings(value: Any) -> Iterator[str]:
    """Yield every text inside messages; keys are the template's, not the row's."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _strings(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _strings(part)


def _with_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Return messages with every text changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: _with_strings(part, change) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_with_strings(part, change) for part in value]
    return value
