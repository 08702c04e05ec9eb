"""Names of a model's control tokens in texts: found as its tokenizer finds them, and cut in two so that it does not.

A tokenizer may look for names after it has changed the text: other case, wide letters made narrow, letters left out.
"""

import re
import unicodedata
from collections.abc import Callable, Iterator
from typing import Any

# No tokenizer's normalisation makes other letters of these, but for their case and for white space.
_ASCII = re.compile(r"[\t\n\r -~]*")
# What stands for a space in the pieces of many tokenizers.
_SPACES = " ▁"


class ControlNames:
    """Of one tokenizer."""

    ids: frozenset[int]  # the control tokens

    def __init__(self, tokenizer: Any, encode: Callable[[str], list[int]]) -> None:
        """encode: a text's tokens, names of control tokens as these."""
        control = control_tokens(tokenizer)
        self.ids = frozenset(control)
        self._encode = encode
        self._normalise = _normaliser_of(tokenizer)
        names = {form for name in control.values() for form in self._forms(name)}
        longest_first = sorted((name for name in names if len(name) > 1), key=len, reverse=True)
        # Some tokenizers match names in any case; one that does not loses nothing by a name cut for its case.
        either = "|".join(map(_pattern, longest_first)) or r"(?!)"
        self._names = re.compile(either, re.IGNORECASE)
        self._first = re.compile(rf"\A\s*(?:{either})")
        self._beginnings = {name[:end].lower() for name in names for end in range(1, len(name))}
        self._longest = max(map(len, names), default=1)

    def stand_in(self, text: str) -> bool:
        """Return whether the tokenizer finds a name in text, or would with a template's or another text behind it."""
        if self._names.search(text) or self._begun(text) or self._begun(self._normalise(text)):
            return True
        return not _ASCII.fullmatch(text) and self._is_found(text)

    def cut(self, text: str, mark: str) -> str:
        """Return text with a mark in each name, and in one that the text's end only begins.

        Where the tokenizer finds names in other letters these become plain ones. One that it still finds between the
        marks is the caller's to refuse.
        """
        changed = text
        for normalise in (lambda text: text, lambda text: unicodedata.normalize("NFKC", text), self._normalise):
            changed = self._marked(normalise(text), mark)
            pieces = changed.split(mark)
            if not self._begun(self._normalise(pieces[-1])) and not any(map(self._is_found, set(pieces))):
                break
        return changed

    def without_first(self, text: str) -> str:
        """Return text without the name that it begins with, if it does."""
        return self._first.sub("", text, count=1)

    def _marked(self, text: str, mark: str) -> str:
        text = self._names.sub(lambda name: f"{name[0][0]}{mark}{name[0][1:]}", text)
        if not (length := self._begun(text)):
            return text
        place = len(text.rstrip()) - length + 1
        return text[:place] + mark + text[place:]

    def _begun(self, text: str) -> int:
        """Return how many letters of a name the text ends with; 0: none. A template may trim it, and join another."""
        tail = text.rstrip()[-self._longest :].lower()
        return next((len(tail) - at for at in range(len(tail)) if tail[at:] in self._beginnings), 0)

    def _is_found(self, text: str) -> bool:
        return bool(text) and not self.ids.isdisjoint(self._encode(text))

    def _forms(self, name: str) -> Iterator[str]:
        """Yield a name, and what the tokenizer may make of it before it looks for it."""
        yield from (name, unicodedata.normalize("NFKC", name), self._normalise(name).strip(_SPACES))


def _pattern(name: str) -> str:
    return "".join(rf"[\s{_SPACES}]+" if letter in _SPACES else re.escape(letter) for letter in name)


def _normaliser_of(tokenizer: Any) -> Callable[[str], str]:
    """Return what the tokenizer does to a text before it looks for names; nothing where it does not say."""
    normaliser = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    return normaliser.normalize_str if normaliser is not None else lambda text: text


def control_tokens(tokenizer: Any) -> dict[int, str]:
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
