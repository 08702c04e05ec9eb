"""Tokens as text for people: samples.jsonl, evaluations.jsonl and the report."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from protocol.node.small_model_files import read_end_tokens

_MOST_PENDING = 64  # tokens without a whole character: more are broken bytes, and each would be decoded again


class TextDecoder:
    """Decodes with the tokenizer.json of a model folder; without one, texts are token ids.

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
            self._tokenizer = Tokenizer.from_file(str(path))
            added = self._tokenizer.get_added_tokens_decoder()
            ends = read_end_tokens(path.parent)
            self._ends = {token for token in ends if token in added and added[token].content[:2] != "</"}
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
