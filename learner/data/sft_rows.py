"""Rows for supervised fine-tuning: tokens with a loss weight each. Their forms: `sft_forms.py`.

Segments are encoded separately, as in rollouts, where turns of model and environment never share a token. Text begins
with the tokenizer's own prefix (BOS, for Llama, Gemma and Mistral) once; messages begin as the chat template does.
"""

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from learner.data.preference_forms import recognise_pair
from learner.data.prompts import Prompt
from learner.data.sft_forms import (
    BadRowError,
    Chat,
    Completion,
    Content,
    Messages,
    Segments,
    Tokens,
    read_demonstrations,
    recognise,
)
from learner.data.unpaired_forms import recognise_unpaired
from protocol.errors import SettingsError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Segment(NamedTuple):
    """A part of a row with one loss weight."""

    text: str  # encoded separately
    weight: float  # loss weight of each token
    is_start: bool = False  # the tokenizer adds its prefix (BOS)


@dataclass(frozen=True)
class SftRow:
    """One row in tokens."""

    tokens: NDArray[np.int32]  # [T]
    weights: NDArray[np.float32]  # [T] loss weights; the first is 0
    reward: float = 0.0  # 1: chosen or desirable answer, -1: rejected or undesirable one


def load_rows(path: Path, model_dir: Path, *, trust_remote_code: bool = False) -> list[SftRow]:
    """Return the file's rows in order, tokenized for the model in `model_dir`.

    trust_remote_code: whether the tokenizer's own code in the folder may run.
    Raises: as `read_demonstrations`; SettingsError with file and row for a row without weighted tokens, with unknown
    ones, or with more than the model's positions.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir, trust_remote_code=trust_remote_code)
    limits = _limits(model_dir)
    demonstrations = read_demonstrations(path)
    rows: list[SftRow | Sequence[Segment]] = []
    for number, _, content in demonstrations:
        with _naming(path, number):
            rows.append(_encoded(content) if isinstance(content, Tokens) else _segments(content, tokenizer))
    texts = dict.fromkeys((part.text, part.is_start) for row in rows if not isinstance(row, SftRow) for part in row)
    ids = _encode(texts, tokenizer)
    joined = []
    for (number, *_), row in zip(demonstrations, rows, strict=True):
        with _naming(path, number):
            joined.append(_checked(row if isinstance(row, SftRow) else _join(row, ids), *limits))
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
        """form: data.form; `sft_forms.py`, `preference_forms.py` and `unpaired_forms.py` have the columns."""
        from transformers import AutoTokenizer

        self._form = form
        self._tokenizer = AutoTokenizer.from_pretrained(model_dir, trust_remote_code=trust_remote_code)
        self._limits = _limits(model_dir)

    def form_of(self, columns: dict[str, Any]) -> str:
        """Return a row's form, in words. Raises: BadRowError."""
        match self._form:
            case "preferences":
                return recognise_pair(columns)[0]
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
        return [replace(chosen, reward=1.0), replace(rejected, reward=-1.0)]

    def _encode(self, content: Content) -> SftRow:
        if isinstance(content, Tokens):
            row = _encoded(content)
        else:
            parts = _segments(content, self._tokenizer)
            row = _join(parts, _encode(dict.fromkeys((part.text, part.is_start) for part in parts), self._tokenizer))
        row = _checked(row, *self._limits)
        if len(others := row.weights[(row.weights != 0.0) & (row.weights != 1.0)]):
            raise BadRowError(f"has the weight {others[0]:g}, and this objective takes 0 or 1. Use policy.warm_start")
        return row


def mismatch(row: SftRow, other: SftRow, max_tokens: int) -> SftRow:
    """Return the prompt of a row with the answer of another one, cut to the model's positions, of reward 0."""
    start, begin = (int(np.argmax(each.weights > 0.0)) for each in (row, other))
    tokens = np.concatenate([row.tokens[:start], other.tokens[begin:]])
    weights = np.concatenate([row.weights[:start], other.weights[begin:]])
    return SftRow(tokens[:max_tokens], weights[:max_tokens])


def _encoded(content: Tokens) -> SftRow:
    return SftRow(np.array(content.ids, np.int32), np.array(content.weights, np.float32))


def _segments(content: Segments | Chat | Completion, tokenizer: "PreTrainedTokenizerBase") -> list[Segment]:
    if isinstance(content, Chat):
        return _chat_segments(content, tokenizer)
    if isinstance(content, Completion):
        return _completion_segments(content, tokenizer)
    bos = str(tokenizer.bos_token or "")
    # A chat template's text begins with BOS already.
    return [
        Segment(text, weight, is_start=i == 0 and not (bos and text.startswith(bos)))
        for i, (text, weight) in enumerate(content.parts)
    ]


def _completion_segments(content: Completion, tokenizer: "PreTrainedTokenizerBase") -> list[Segment]:
    prompt = content.prompt
    is_text = isinstance(prompt, str)
    if not isinstance(prompt, str):
        prompt = _render(prompt, content.tools, tokenizer, add_generation_prompt=True)
    end = str(tokenizer.eos_token or "")
    # A text that a template has written ends so already.
    last = [] if end and content.response.endswith(end) else [Segment(end, 1.0)]
    return [Segment(prompt, 0.0, is_start=is_text), Segment(content.response, 1.0), *last]


def _chat_segments(content: Chat, tokenizer: "PreTrainedTokenizerBase") -> list[Segment]:
    """Return the rendered conversation, split where messages of the loss begin and end."""
    segments: list[Segment] = []
    done, messages = "", content.messages
    for i, of_message in enumerate(content.weights):
        if not of_message:
            continue
        for until, weight in (
            (_render(messages[:i], content.tools, tokenizer, add_generation_prompt=True), 0.0),
            (_render(messages[: i + 1], content.tools, tokenizer, add_generation_prompt=False), of_message),
        ):
            if not until.startswith(done):
                raise BadRowError(
                    f"messages[{i}]: the model's chat template writes earlier messages in another way once later ones "
                    'follow. Give the row as "segments"'
                )
            segments.append(Segment(until[len(done) :], weight))
            done = until
    return segments


def _render(
    messages: Messages, tools: list[Any] | None, tokenizer: "PreTrainedTokenizerBase", *, add_generation_prompt: bool
) -> str:
    if not messages:
        return ""
    if not tokenizer.chat_template:
        raise BadRowError('has chat messages, and the model has no chat template. Give "segments", or text')
    return str(
        tokenizer.apply_chat_template(
            list(messages), tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
        )
    )


def _encode(
    texts: Collection[tuple[str, bool]], tokenizer: "PreTrainedTokenizerBase"
) -> dict[tuple[str, bool], NDArray[np.int32]]:
    """Return the tokens of each (text, whether a row starts with it). All at once: the tokenizer uses every core."""
    encoded: dict[tuple[str, bool], NDArray[np.int32]] = {}
    for at_start in (True, False):
        ordered = [text for text, is_start in texts if is_start == at_start and (text or is_start)]
        if ordered:
            found = tokenizer(ordered, add_special_tokens=at_start, return_attention_mask=False)["input_ids"]
            encoded |= {(text, at_start): np.array(ids, np.int32) for text, ids in zip(ordered, found, strict=True)}
    return encoded


def _join(segments: Sequence[Segment], ids: dict[tuple[str, bool], NDArray[np.int32]]) -> SftRow:
    encoded = [(ids.get((part.text, part.is_start)), part.weight) for part in segments]
    parts = [(tokens, weight) for tokens, weight in encoded if tokens is not None and len(tokens)]
    if not parts:
        raise BadRowError("has no text")
    tokens = np.concatenate([part for part, _ in parts])
    return SftRow(tokens, np.concatenate([np.full(len(part), weight, np.float32) for part, weight in parts]))


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
    most = 2**31
    return int(config.get("max_position_embeddings") or most), int(config.get("vocab_size") or most)
