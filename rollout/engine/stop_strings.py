"""Finds stop strings in tokens without decoding every token."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Agents may send any number of different stop strings.
_MAX_REMEMBERED = 1000


def has_fast_tokenizer(tokenizer: Any) -> bool:
    """Return whether `StopStrings` supports this transformers tokenizer: one of the tokenizers library."""
    return hasattr(getattr(tokenizer, "_tokenizer", None), "decode")


@dataclass(frozen=True)
class _StopSet:
    """Stop strings of a request, and facts about them."""

    strings: tuple[str, ...]  # stop strings in the request's order
    longest: int  # in characters
    ends: frozenset[str] | None  # last characters of the strings; None: a token's own text may not show them


class StopStrings:
    """Finds stop strings at the end of tokens. tokenizer: see `has_fast_tokenizer`."""

    def __init__(self, tokenizer: Any) -> None:
        self._decode = tokenizer._tokenizer.decode
        self._stop_sets: dict[tuple[str, ...], _StopSet] = {}
        self._texts: dict[int, str] = {}

    def find(self, tokens: Sequence[int], strings: tuple[str, ...]) -> str | None:
        """Return the stop string that ends in the last token, the first of several; None when there is none.

        tokens: all tokens of the turn. No stop string ended in an earlier token.
        """
        stop_set = self._stop_set(strings)
        if stop_set is None:
            return None
        if stop_set.ends is not None and stop_set.ends.isdisjoint(self.text_of(tokens[-1])):
            return None
        text = self._tail(tokens, stop_set.longest)
        places = [(place + len(string), string) for string in stop_set.strings if (place := text.find(string)) >= 0]
        return min(places, key=lambda place: place[0])[1] if places else None

    def text_of(self, token: int) -> str:
        """Return the text of one token; a control token's is its name."""
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self._decode([token], skip_special_tokens=False)
        return text

    def _stop_set(self, strings: tuple[str, ...]) -> _StopSet | None:
        stop_set = self._stop_sets.get(strings)
        if stop_set is None:
            if len(self._stop_sets) == _MAX_REMEMBERED:
                self._stop_sets.clear()
            stop_set = self._stop_sets[strings] = _make_stop_set(tuple(string for string in strings if string))
        return stop_set if stop_set.strings else None

    def _tail(self, tokens: Sequence[int], num_characters: int) -> str:
        """Return the end of the tokens' text: at least num_characters before the last token, or the whole text.

        The first character may be incomplete, because the bytes of one character may be spread over tokens.
        """
        num_wanted = num_characters + len(self.text_of(tokens[-1]))
        count = num_characters + 4
        while True:
            text: str = self._decode(list(tokens[-count:]), skip_special_tokens=False)
            if len(text.lstrip("\ufffd")) > num_wanted or count >= len(tokens):
                return text
            count *= 2


def _make_stop_set(strings: tuple[str, ...]) -> _StopSet:
    ends = frozenset(string[-1] for string in strings)
    # A decoded single token may lack its space, and a character outside ASCII may be spread over several tokens.
    is_shown = all(end.isascii() and end != " " for end in ends)
    return _StopSet(strings, max(map(len, strings), default=0), ends if is_shown else None)
