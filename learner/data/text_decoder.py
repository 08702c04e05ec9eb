"""Tokens as text for people: samples.jsonl, evaluations.jsonl and the report."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from protocol.node.small_model_files import read_end_tokens

# Entries of tokenizer_config.json and special_tokens_map.json that name special tokens, in the order of transformers.
_SPECIAL = [f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
_OTHERS = ("additional_special_tokens", "extra_special_tokens")
_MOST_PENDING = 64  # tokens without a whole character: more are broken bytes, and each would be decoded again


class TextDecoder:
    """Decodes with the tokenizer.json of a model folder and the tokens that its small files add, as transformers does.

    Without a tokenizer.json, texts are token ids.

    problem: why there is no tokenizer, or None.
    """

    def __init__(self, folder: Path | None = None) -> None:
        path = None if folder is None else folder / "tokenizer.json"
        self._tokenizer: Tokenizer | None = None
        self._ends: set[int] = set()  # added tokens that end a turn, special or not; tags such as </answer> are text
        self.problem: str | None = None
        if path is None or not path.is_file():
            self.problem = f"{path or 'tokenizer.json'} is not there: trajectories are shown as token ids."
            return
        try:
            tokenizer = Tokenizer.from_file(str(path))
            tokenizer.add_tokens(_missing_tokens(tokenizer, path.parent))
            added = tokenizer.get_added_tokens_decoder()
            ends = read_end_tokens(path.parent)
            self._ends = {token for token in ends if token in added and added[token].content[:2] != "</"}
            self._tokenizer = tokenizer
        except Exception as error:  # `tokenizers` raises Exception itself for an invalid file
            self.problem = f"{path} is not a tokenizer ({error}): trajectories are shown as token ids."

    def texts(self, tokens: Sequence[int], ends: Sequence[int]) -> list[str]:
        """Return the text of each piece of a conversation. ends: the end of each piece, rising.

        A piece is the difference between two decoded prefixes: some tokenizers drop the leading space of a piece that
        is decoded alone. A character with bytes in both pieces changes the earlier text: then the piece is decoded
        alone.
        """
        texts: list[str] = []
        before, start = "", 0
        for end in ends:
            after = self._decode(tokens[:end])
            texts.append(after[len(before) :] if after.startswith(before) else self._decode(tokens[start:end]))
            before, start = after, end
        return texts

    def token_texts(self, tokens: Sequence[int]) -> list[str]:
        """Return the text that each token adds: a character of several tokens is added by its last one."""
        texts: list[str] = []
        known, shown = 0, 0  # tokens before the window; tokens whose text has been added
        for end in range(1, len(tokens) + 1):
            before, now = self._decode(tokens[known:shown]), self._decode(tokens[known:end])
            is_due = end == len(tokens) or end - shown >= _MOST_PENDING
            is_whole = is_due or (len(now) > len(before) and not now.endswith("\ufffd"))
            texts.append(now[len(before) :] if is_whole else "")
            if is_whole:
                known, shown = shown, end
        return texts

    def answer(self, tokens: Sequence[int], start: int) -> str:
        """Return the text from `start` on, without a special token or the model's end of a turn at its end."""
        last = tokens[-1]
        is_special = self._tokenizer is not None and not self._tokenizer.decode([last], skip_special_tokens=True)
        is_ended = is_special or last in self._ends
        return self.texts(tokens, (start, len(tokens) - is_ended))[1]

    def _decode(self, tokens: Sequence[int]) -> str:
        if self._tokenizer is None:
            return "".join(f"{token} " for token in tokens)
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))


def _missing_tokens(tokenizer: Tokenizer, folder: Path) -> list[AddedToken]:
    """Return the tokens that transformers adds to a tokenizer.json when it loads its folder, in their ids' order."""
    names, given = _read(folder / "tokenizer_config.json"), {}
    if "added_tokens_decoder" in names:
        given = {int(token): AddedToken(**fields) for token, fields in names["added_tokens_decoder"].items()}
    else:  # a folder of an older transformers
        names |= _read(folder / "special_tokens_map.json")
    values = [names.get(entry) for entry in _SPECIAL]
    for entry in _OTHERS:
        others = names.get(entry) or []
        values += others.values() if isinstance(others, dict) else others
    special = [str(value["content"] if isinstance(value, dict) else value) for value in values if value is not None]
    if "added_tokens_decoder" not in names:
        for name, token in _read(folder / "added_tokens.json").items():
            given[token] = AddedToken(name, special=name in special, normalized=name not in special)
    known = {added.content for added in tokenizer.get_added_tokens_decoder().values()}
    # A special token may be in the vocabulary without being an added one.
    added = {given[token].content: given[token] for token in sorted(given)}
    added = {name: added.get(name, AddedToken(name, special=True)) for name in (*added, *special)}
    return [token for name, token in added.items() if name not in known]


def _read(path: Path) -> dict[str, Any]:
    """Return a small JSON file; empty if it is missing."""
    return dict(json.loads(path.read_bytes())) if path.is_file() else {}
