"""Where a turn ends: stop strings found in tokens, without decoding every token that is written."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Agents send what they like.
_MAX_REMEMBERED = 1000


def has_fast_tokenizer(tokenizer: Any) -> bool:
    """Return whether `StopStrings` can use this tokenizer of transformers: one that the tokenizers library runs."""
    return hasattr(getattr(tokenizer, "_tokenizer", None), "decode")


@dataclass(frozen=True)
class _Asked:
    """Some stop strings, and what is known of them."""

    strings: tuple[str, ...]  # in the order in which they were asked for
    longest: int  # characters of the longest
    ends: frozenset[str] | None  # characters that they end with; None: a token's own text may not show such a one


class StopStrings:
    """Finds stop strings at the end of a text of tokens. tokenizer: see `has_fast_tokenizer`."""

    def __init__(self, tokenizer: Any) -> None:
        self._decode = tokenizer._tokenizer.decode
        self._asked: dict[tuple[str, ...], _Asked] = {}
        self._texts: dict[int, str] = {}

    def found(self, tokens: Sequence[int], strings: tuple[str, ...]) -> str | None:
        """Return the string that ends in the last token; None: none does. Of several the one that ends first.

        tokens: of the turn so far; none of the strings ended in an earlier one.
        """
        asked = self._asked_for(strings)
        if asked is None:
            return None
        if asked.ends is not None and asked.ends.isdisjoint(self._text_of(tokens[-1])):
            return None
        text = self._tail(tokens, asked.longest)
        places = [(place + len(string), string) for string in asked.strings if (place := text.find(string)) >= 0]
        return min(places, key=lambda place: place[0])[1] if places else None

    def _asked_for(self, strings: tuple[str, ...]) -> _Asked | None:
        asked = self._asked.get(strings)
        if asked is None:
            if len(self._asked) == _MAX_REMEMBERED:
                self._asked.clear()
            asked = self._asked[strings] = _known_of(tuple(string for string in strings if string))
        return asked if asked.strings else None

    def _text_of(self, token: int) -> str:
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self._decode([token], skip_special_tokens=False)
        return text

    def _tail(self, tokens: Sequence[int], num_characters: int) -> str:
        """Return the end of the tokens' text, longer than asked for: its first character may be half of one; or all.

        What the last token says does not count, since a string may end at its beginning; nor do bytes of a character
        that began before, each of which is shown as one.
        """
        num_wanted = num_characters + len(self._text_of(tokens[-1]))
        count = num_characters + 4
        while True:
            text: str = self._decode(list(tokens[-count:]), skip_special_tokens=False)
            if len(text.lstrip("\ufffd")) > num_wanted or count >= len(tokens):
                return text
            count *= 2


def _known_of(strings: tuple[str, ...]) -> _Asked:
    ends = frozenset(string[-1] for string in strings)
    # A space may be left out where a token stands alone, and other characters may be spread over several tokens.
    is_shown = all(end.isascii() and end != " " for end in ends)
    return _Asked(strings, max(map(len, strings), default=0), ends if is_shown else None)
