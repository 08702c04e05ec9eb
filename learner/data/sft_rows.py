"""Rows for supervised fine-tuning: tokens with a loss weight each. Their forms: `sft_forms.py`.

Segments are encoded separately, as in rollouts, where turns of model and environment never share a token. Text begins
with the tokenizer's own prefix (BOS, for Llama, Gemma and Mistral) once; messages begin as the chat template does.
"""

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from learner.data.preference_forms import recognise_pair, recognise_unpaired
from learner.data.prompts import Prompt
from learner.data.sft_forms import (
    BadRowError,
    Chat,
    Content,
    Tokens,
    read_demonstrations,
    recognise,
)
from learner.data.sft_segments import Place, Segment, segments_of
from protocol.errors import SettingsError
from protocol.node.small_model_files import read_end_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class SftRow:
    """One row in tokens."""

    tokens: NDArray[np.int32]  # [T]
    weights: NDArray[np.float32]  # [T] loss weights; the first is 0
    reward: float = 0.0  # 1 (plus a pair's margin): chosen or desirable answer, -1: rejected or undesirable one


def load_rows(path: Path, model_dir: Path, *, trust_remote_code: bool = False) -> list[SftRow]:
    """Return the file's rows in order, tokenized for the model in `model_dir`.

    trust_remote_code: whether the tokenizer's own code in the folder may run.
    Raises: as `read_demonstrations`; SettingsError with file and row for a row without weighted tokens, with unknown
    ones, or with more than the model's positions.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir, trust_remote_code=trust_remote_code)
    limits, ends = _limits(model_dir), read_end_tokens(model_dir)
    demonstrations = read_demonstrations(path)
    rows: list[SftRow | Sequence[Segment]] = []
    for number, _, content in demonstrations:
        with _naming(path, number):
            rows.append(_encoded(content) if isinstance(content, Tokens) else segments_of(content, tokenizer, ends))
    ids = _encode([row for row in rows if not isinstance(row, SftRow)], tokenizer)
    joined = []
    for (number, *_), row in zip(demonstrations, rows, strict=True):
        with _naming(path, number):
            joined.append(_checked(row if isinstance(row, SftRow) else _join(row, next(ids)), *limits))
    return joined


@contextmanager
def _naming(path: Path, number: int) -> Iterator[None]:
    try:
        yield
    except BadRowError as error:
        raise SettingsError(f"data: {path} line {number}: {error}.") from None


class RowEncoder:
    """Turns single rows into tokens, for the model in `model_dir`. trust_remote_code: as for `load_rows`."""

    def __init__(self, model_dir: Path, form: str = "demonstrations", *, trust_remote_code: bool = False) -> None:
        """form: data.form; `sft_forms.py` and `preference_forms.py` have the columns."""
        from transformers import AutoTokenizer

        self._form = form
        self._tokenizer = AutoTokenizer.from_pretrained(model_dir, trust_remote_code=trust_remote_code)
        self._limits, self._ends = _limits(model_dir), read_end_tokens(model_dir)
        self.has_chat = False  # whether an encoded row was written by the chat template

    def form_of(self, columns: dict[str, Any]) -> str:
        """Return a row's form, in words. Raises: BadRowError."""
        match self._form:
            case "preferences" | "reward_pairs":
                return recognise_pair(columns)[0] + (" + margin" if self._margin_of(columns) else "")
            case "unpaired":
                return recognise_unpaired(columns)[0]
        return recognise(columns)[0]

    def encode(self, columns: dict[str, Any], another: Callable[[], Prompt] | None = None) -> list[SftRow]:
        """Return the row's group: a demonstration; or a pair's chosen and rejected answer; or a labelled answer.

        another: returns another row, whose answer to this row's prompt follows a labelled answer. Weights are 0 or 1.
        Raises: BadRowError.
        """
        if self._form == "demonstrations":
            return [self._encode(recognise(columns)[1])]
        if self._form == "unpaired":
            _, content, is_desirable = recognise_unpaired(columns)
            row = replace(self._encode(content), reward=1.0 if is_desirable else -1.0)
            if another is None:
                return [row]
            other = self._encode(recognise_unpaired(another().columns)[1])
            return [row, mismatch(row, other, self._limits[0])]
        chosen, rejected = (self._encode(content) for content in recognise_pair(columns)[1])
        if np.array_equal(chosen.tokens, rejected.tokens):
            raise BadRowError("has chosen and rejected answers of equal tokens: they say nothing about each other")
        first, second = (each.tokens[: _prompt_length(each)] for each in (chosen, rejected))
        if not np.array_equal(first, second):
            raise BadRowError(
                "has chosen and rejected answers to two prompts: the tokens before the learnt ones differ"
            )
        if self._form == "reward_pairs":
            chosen, rejected = self._with_end(chosen), self._with_end(rejected)
        return [replace(chosen, reward=1.0 + self._margin_of(columns)), replace(rejected, reward=-1.0)]

    def _margin_of(self, columns: dict[str, Any]) -> float:
        """Return by how much a reward model is to prefer the chosen answer."""
        margin = columns.get("margin") if self._form == "reward_pairs" else None
        if margin is None:
            return 0.0
        if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
            raise BadRowError(f"margin is {margin!r}, expected a number")
        return float(margin)

    def _with_end(self, row: SftRow) -> SftRow:
        """Return the row with the end token last: a served reward model reads the reward there.

        Without the template's white space behind the end of a turn: the served text of a rollout has none.
        """
        end = self._tokenizer.eos_token_id
        if end is None:
            return row
        added = self._tokenizer.added_tokens_decoder.items()
        controls = [end, *(token for token, each in added if each.special or token in self._ends)]
        tokens = row.tokens[:-1] if row.tokens[-1] == end else row.tokens
        ends = np.flatnonzero(np.isin(tokens, controls) & (row.weights[: len(tokens)] > 0.0))
        if len(ends) and not self._tokenizer.decode(tokens[ends[-1] + 1 :]).strip():
            tokens = tokens[: ends[-1] + 1]
        tokens = tokens if tokens[-1:] == [end] else np.append(tokens, np.int32(end))
        weights = np.append(row.weights, np.float32(1.0))[: len(tokens)]
        return _checked(replace(row, tokens=tokens, weights=weights), *self._limits)

    def _encode(self, content: Content) -> SftRow:
        if isinstance(content, Tokens):
            row = _encoded(content)
        else:
            self.has_chat |= isinstance(content, Chat) or isinstance(getattr(content, "prompt", ""), list)
            parts = segments_of(content, self._tokenizer, self._ends)
            row = _join(parts, next(_encode([parts], self._tokenizer)))
        row = _checked(row, *self._limits)
        if len(others := row.weights[(row.weights != 0.0) & (row.weights != 1.0)]):
            raise BadRowError(f"has the weight {others[0]:g}, and this objective takes 0 or 1. Use policy.warm_start")
        return row


def mismatch(row: SftRow, other: SftRow, max_tokens: int) -> SftRow:
    """Return the prompt of a row with the answer of another one, cut to the model's positions, of reward 0."""
    start, begin = _prompt_length(row), _prompt_length(other)
    tokens = np.concatenate([row.tokens[:start], other.tokens[begin:]])
    weights = np.concatenate([row.weights[:start], other.weights[begin:]])
    return SftRow(tokens[:max_tokens], weights[:max_tokens])


def _prompt_length(row: SftRow) -> int:
    """Return the number of tokens before the first learnt one."""
    return int(np.argmax(row.weights > 0.0))


def _encoded(content: Tokens) -> SftRow:
    return SftRow(np.array(content.ids, np.int32), np.array(content.weights, np.float32))


def _encode(rows: Sequence[Sequence[Segment]], tokenizer: "PreTrainedTokenizerBase") -> Iterator[list[list[int]]]:
    """Return the tokens of each row's segments. Equal segments are encoded once, all at once, on every core."""
    mark, num_cut = _mark(tokenizer)
    prefix = _prefix(tokenizer)
    encoded = _encode_alone({(part.text, part.place) for row in rows for part in row}, tokenizer, mark, num_cut)
    for row in rows:
        # Where a tokenizer puts a space before some texts, the whole row shows where.
        tokens = _encode_whole(row, tokenizer) if mark and tokenizer.is_fast else None
        tokens = tokens or [encoded[part.text, part.place] for part in row]
        if row and row[0].place is Place.START:
            tokens = [[*prefix, *tokens[0]], *tokens[1:]]
        yield tokens


def _encode_alone(
    texts: Collection[tuple[str, Place]], tokenizer: "PreTrainedTokenizerBase", mark: str, num_cut: int
) -> dict[tuple[str, Place], list[int]]:
    """Return the tokens of each text at its place. mark: text of num_cut tokens, put before one that follows others."""
    encoded: dict[tuple[str, Place], list[int]] = {each: [] for each in texts}
    for is_behind in (False, True):
        chosen = [each for each in texts if each[0] and (each[1] is Place.BEHIND) == is_behind]
        if chosen:
            before, cut = (mark, num_cut) if is_behind else ("", 0)
            marked = [before + text for text, _ in chosen]
            found = tokenizer(marked, add_special_tokens=False, return_attention_mask=False)["input_ids"]
            encoded |= {each: list(ids[cut:]) for each, ids in zip(chosen, found, strict=True)}
    return encoded


def _encode_whole(row: Sequence[Segment], tokenizer: "PreTrainedTokenizerBase") -> list[list[int]] | None:
    """Return the tokens of each segment in the row's whole text; None: a token crosses the end of a segment."""
    ends = list(accumulate(len(part.text) for part in row))
    found = tokenizer("".join(part.text for part in row), add_special_tokens=False, return_offsets_mapping=True)
    tokens: list[list[int]] = [[] for _ in row]
    for token, (start, end) in zip(found["input_ids"], found["offset_mapping"], strict=True):
        place = min(bisect_right(ends, start), len(row) - 1)
        if end > ends[place]:
            return None
        tokens[place].append(token)
    return tokens


def _prefix(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Return what the tokenizer puts before a text, such as BOS. What it puts behind one does not belong in a row."""
    bare, whole = (tokenizer("a", add_special_tokens=each)["input_ids"] for each in (False, True))
    starts = range(len(whole) - len(bare) + 1)
    return list(whole[: next((i for i in starts if whole[i : i + len(bare)] == bare), 0)])


def _mark(tokenizer: "PreTrainedTokenizerBase") -> tuple[str, int]:
    """Return a text, with its number of tokens, behind which a tokenizer puts no space before a text; empty: none does.

    Llama 2, Mistral, Phi 3 and T5 put one before each text that is encoded separately.
    """
    for text in ("\n", ".", "0"):
        mark, bare, both = (tokenizer(each, add_special_tokens=False)["input_ids"] for each in (text, "a", text + "a"))
        if both[: len(mark)] == mark and both[len(mark) :] != bare:
            return text, len(mark)
    return "", 0


def _join(segments: Sequence[Segment], ids: Sequence[Sequence[int]]) -> SftRow:
    weights = [np.full(len(tokens), part.weight, np.float32) for part, tokens in zip(segments, ids, strict=True)]
    if not any(len(tokens) for tokens in ids):
        raise BadRowError("has no text")
    return SftRow(np.array([token for tokens in ids for token in tokens], np.int32), np.concatenate(weights))


def _checked(row: SftRow, max_tokens: int, vocab_size: int) -> SftRow:
    tokens, weights = row.tokens, row.weights
    weights[:1] = 0.0  # the first token has no context to be predicted from
    if len(tokens) > max_tokens:
        raise BadRowError(f"has {len(tokens)} tokens, and the model has {max_tokens} positions. Shorten it")
    if len(unknown := tokens[(tokens < 0) | (tokens >= vocab_size)]):
        raise BadRowError(f"has the token {unknown[0]}, and the model has {vocab_size} tokens, 0 to {vocab_size - 1}")
    if not weights.any():
        raise BadRowError("has no token with a weight above 0: there is nothing to learn from it")
    return row


def _limits(model_dir: Path) -> tuple[int, int]:
    """Return the model's numbers of positions and of tokens."""
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    config |= config.get("text_config") or {}  # a model of text and images
    positions = config.get("max_position_embeddings") or config.get("n_positions")
    most = 2**31
    return int(positions or most), int(config.get("vocab_size") or most)
