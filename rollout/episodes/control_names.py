"""Names of a model's control tokens in texts, such as `<|im_end|>` in a user's message.

`occur_in` finds them as the tokenizer would. `cut` breaks them with a mark, so that they are tokenized as plain text.
A tokenizer may normalise a text before it searches: change its case, narrow wide letters, omit letters.
"""

import re
import unicodedata
from collections.abc import Callable, Iterator
from typing import Any

# Letters that no tokenizer's normalisation changes, except for case and white space.
_ASCII = re.compile(r"[\t\n\r -~]*")
# Signs of a space in the pieces of many tokenizers.
_SPACES = " ▁"


class ControlNames:
    """The names of one tokenizer's control tokens, and searches for them."""

    ids: frozenset[int]

    def __init__(self, tokenizer: Any, encode: Callable[[str], list[int]]) -> None:
        """encode: returns a text's tokens, control tokens included."""
        control = control_tokens(tokenizer)
        self.ids = frozenset(control)
        self._encode = encode
        self._normalise = _normaliser_of(tokenizer)
        names = {form for name in control.values() for form in self._forms(name)}
        longest_first = sorted((name for name in names if len(name) > 1), key=len, reverse=True)
        # Some tokenizers match names in any case. For others a cut is harmless.
        any_name = "|".join(map(_pattern, longest_first)) or r"(?!)"  # (?!) matches nothing
        self._names = re.compile(any_name, re.IGNORECASE)
        self._leading_name = re.compile(rf"\s*(?:{any_name})")
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


def control_tokens(tokenizer: Any) -> dict[int, str]:
    """Return id and name of each control token. The token for unknown text is not one."""
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


def control_tokens_but_tags(tokenizer: Any) -> frozenset[int]:
    """Return the control tokens without pairs such as `<think>` and `</think>`, which are part of a response's text."""
    control = control_tokens(tokenizer)
    names = set(control.values())
    ends = {getattr(tokenizer, f"{kind}_token_id", None) for kind in ("bos", "eos", "pad")}  # may be <s> and </s>

    def is_tag(token: int) -> bool:
        name = control[token]
        other = f"<{name[2:]}" if name.startswith("</") else f"</{name[1:]}"
        return name.startswith("<") and other in names and token not in ends

    return frozenset(token for token in control if not is_tag(token))
