"""Stop strings found in tokens."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rollout.engine.stop_strings import StopStrings, has_fast_tokenizer

_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
_WORDS = ["</search>", "><", "h>", "Ġ>"]


class CountingTokenizer:
    """A byte-level tokenizer of a token for each byte and for each of some words; counts what is decoded."""

    def __init__(self) -> None:
        vocabulary = {text: number for number, text in enumerate([*_ALPHABET, *_WORDS])}
        self._plain = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        self._plain.decoder = decoders.ByteLevel()
        self._tokenizer = self
        self.decoded: list[int] = []

    def tokens(self, text: str) -> list[int]:
        """Return a token for each word between bars, and for each byte of other texts: `a|</search>|`."""
        names = [*_ALPHABET, *_WORDS]
        tokens = []
        for part in text.split("|"):
            mapped = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(part)
            written = "".join(piece for piece, _ in mapped)
            tokens += [names.index(written)] if written in _WORDS else [names.index(letter) for letter in written]
        return tokens

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        self.decoded.append(len(tokens))
        return str(self._plain.decode(tokens, skip_special_tokens=False))


def _ended(text: str, *strings: str) -> tuple[str, str] | None:
    """Return what was written until a stop string was found, token by token, and the string."""
    tokenizer = CountingTokenizer()
    stops, tokens = StopStrings(tokenizer), tokenizer.tokens(text)
    for end in range(1, len(tokens) + 1):
        if (found := stops.find(tokens[:end], strings)) is not None:
            return tokenizer.decode(tokens[:end], skip_special_tokens=False), found
    return None


@pytest.mark.parametrize(
    ("text", "strings", "ended"),
    [
        ("a|</search>|b", ("</search>",), ("a</search>", "</search>")),
        ("a</search>b", ("</search>",), ("a</search>", "</search>")),
        ("a</searc|h>|b", ("</search>",), ("a</search>", "</search>")),
        ("a</search|><|b", ("</search>",), ("a</search><", "</search>")),
        ("a>b", ("</search>",), None),
        ("one\n\ntwo", ("\n\n",), ("one\n\n", "\n\n")),
        ("no end", ("end", "d"), ("no end", "end")),
        ("either or", ("or", "ei"), ("ei", "ei")),
        ("a stop here", ("stop ",), ("a stop ", "stop ")),
        ("nothing", ("",), None),
        ("one of two", ("", "of"), ("one of", "of")),
        ("ein Stück weiter", ("Stü",), ("ein Stü", "Stü")),
        ("ok 🎉🎊 more", ("🎉🎊",), ("ok 🎉🎊", "🎉🎊")),
        ("ok 🎉🎊🎈 more", ("🎉🎊🎈",), ("ok 🎉🎊🎈", "🎉🎊🎈")),
        ("ok 🎉🎊|</search>|", ("🎉🎊<",), ("ok 🎉🎊</search>", "🎉🎊<")),
        ("答案好。then", ("好。",), ("答案好。", "好。")),
    ],
)
def test_turn_ends_with_the_token_that_a_stop_string_ends_in(
    text: str, strings: tuple[str, ...], ended: tuple[str, str] | None
) -> None:
    assert _ended(text, *strings) == ended


def test_only_the_end_of_a_long_turn_is_decoded() -> None:
    tokenizer = CountingTokenizer()
    stops, tokens = StopStrings(tokenizer), tokenizer.tokens("x>" * 5000)
    assert stops.find(tokens, ("</search>",)) is None
    assert max(tokenizer.decoded) <= 16


def test_tokens_that_cannot_end_a_stop_string_are_decoded_once() -> None:
    tokenizer = CountingTokenizer()
    stops, tokens = StopStrings(tokenizer), tokenizer.tokens("abababab")
    for end in range(1, len(tokens) + 1):
        stops.find(tokens[:end], ("</search>",))
    assert tokenizer.decoded == [1, 1]


def test_ever_new_stop_strings_are_not_remembered_for_ever() -> None:
    tokenizer = CountingTokenizer()
    stops, tokens = StopStrings(tokenizer), tokenizer.tokens("a9")
    for number in range(5000):
        stops.find(tokens, (f"{number}",))
    assert len(stops._stop_sets) <= 1000


def test_end_that_takes_several_tokens_to_show_is_found_behind_many_that_show_nothing() -> None:
    # 40 bytes of one character each that is never whole: their text is shorter than their number of tokens.
    tokenizer = CountingTokenizer()
    tokens = [*tokenizer.tokens("stop"), *tokenizer.tokens("é")[:1] * 40, *tokenizer.tokens(">")]
    assert StopStrings(tokenizer).find(tokens, ("\ufffd>",)) == "\ufffd>"


def test_tokenizers_of_transformers_are_told_apart(tmp_path: Path) -> None:
    plain: Any = CountingTokenizer()._plain
    plain.save(str(tmp_path / "tokenizer.json"))
    assert json.loads((tmp_path / "tokenizer.json").read_text())["model"]["type"] == "BPE"
    assert has_fast_tokenizer(PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json")))
    assert not has_fast_tokenizer(object())
