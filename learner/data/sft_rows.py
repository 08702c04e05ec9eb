"""Rows for supervised fine-tuning, from a JSONL file: tokens with a loss weight each.

A line is one of

    {"messages": [{"role": ..., "content": ...}, ...]}            loss on assistant messages
    {"prompt": text or messages, "response": text}                loss on the response and its end token
    {"segments": [{"text": ..., "weight": number}, ...]}          loss as weighted; 0: none

Segments are encoded separately, as in rollouts, where turns of model and environment never share a token. Text begins
with the tokenizer's own prefix (BOS, for Llama, Gemma and Mistral) once; messages begin as the chat template does.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from protocol.errors import OperatorError

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


class _BadLineError(Exception):
    pass


def load_rows(path: Path, model_dir: Path, *, trust_remote_code: bool = False) -> list[SftRow]:
    """Return the file's rows in order, tokenized for the model in `model_dir`.

    trust_remote_code: whether the tokenizer's own code in the folder may run.
    Raises: OperatorError with file and line for an invalid line, a row without weighted tokens, or one longer than the
    model's positions; and for a file that is empty or cannot be read.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir, trust_remote_code=trust_remote_code)
    max_tokens = _max_positions(model_dir)
    lines = _read_lines(path)
    segmented = []
    for number, line in lines:
        try:
            segmented.append(_segments(_parse(line), tokenizer))
        except _BadLineError as error:
            raise OperatorError(f"{path}, line {number}: {error}") from None
    ids = _encode(dict.fromkeys((part.text, part.is_start) for row in segmented for part in row), tokenizer)
    rows = []
    for (number, _), row in zip(lines, segmented, strict=True):
        try:
            rows.append(_join(row, ids, max_tokens))
        except _BadLineError as error:
            raise OperatorError(f"{path}, line {number}: {error}") from None
    if not rows:
        raise OperatorError(f"{path} has no rows. Give a JSONL file with one training row on each line.")
    return rows


def _read_lines(path: Path) -> list[tuple[int, str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise OperatorError(f"{path} cannot be read: {error.strerror}. Give an existing JSONL file.") from None
    except UnicodeDecodeError as error:
        raise OperatorError(f"{path} is not UTF-8 at byte {error.start}. Save it as UTF-8.") from None
    return [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]


def _parse(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise _BadLineError(f"is not JSON ({error})") from None
    if not isinstance(row, dict):
        raise _BadLineError(f"is {type(row).__name__}, expected an object")
    return row


def _segments(row: dict[str, Any], tokenizer: "PreTrainedTokenizerBase") -> list[Segment]:
    if "segments" in row:
        return _weighted_segments(row["segments"], str(tokenizer.bos_token or ""))
    if "messages" in row:
        return _chat_segments(_checked_messages(row["messages"], "messages"), tokenizer)
    if "prompt" in row and "response" in row:
        return _completion_segments(row["prompt"], row["response"], tokenizer)
    raise _BadLineError(f'has the keys {sorted(row)}, expected "segments", "messages", or "prompt" and "response"')


def _weighted_segments(segments: Any, bos: str) -> list[Segment]:
    if not isinstance(segments, list):
        raise _BadLineError("segments is not a list")
    checked: list[Segment] = []
    for i, segment in enumerate(segments):
        text, weight = (segment.get("text"), segment.get("weight")) if isinstance(segment, dict) else (None, None)
        if not isinstance(text, str):
            raise _BadLineError(f"segments[{i}].text is {text!r}, expected a string")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not (isfinite(weight) and weight >= 0):
            raise _BadLineError(f"segments[{i}].weight is {weight!r}, expected a number of at least 0")
        # A chat template's text begins with BOS already.
        is_start = not checked and not (bos and text.startswith(bos))
        checked.append(Segment(text, float(weight), is_start))
    return checked


def _completion_segments(prompt: Any, response: Any, tokenizer: "PreTrainedTokenizerBase") -> list[Segment]:
    if not isinstance(response, str):
        raise _BadLineError(f"response is {response!r}, expected a string")
    is_text = isinstance(prompt, str)
    if not is_text:
        prompt = _render(_checked_messages(prompt, "prompt"), tokenizer, add_generation_prompt=True)
    end = str(tokenizer.eos_token or "")
    return [Segment(prompt, 0.0, is_start=is_text), Segment(response, 1.0), Segment(end, 1.0)]


def _chat_segments(messages: Sequence[dict[str, Any]], tokenizer: "PreTrainedTokenizerBase") -> list[Segment]:
    """Return the rendered conversation, split where assistant messages begin and end."""
    segments: list[Segment] = []
    done = ""
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        for until, weight in (
            (_render(messages[:i], tokenizer, add_generation_prompt=True), 0.0),
            (_render(messages[: i + 1], tokenizer, add_generation_prompt=False), 1.0),
        ):
            if not until.startswith(done):
                raise _BadLineError(
                    f"messages[{i}]: the model's chat template writes earlier messages in another way once later ones "
                    'follow. Give the row as "segments"'
                )
            segments.append(Segment(until[len(done) :], weight))
            done = until
    if not segments:
        raise _BadLineError("has no message of the role assistant: there is nothing to learn from it")
    return segments


def _render(
    messages: Sequence[dict[str, Any]], tokenizer: "PreTrainedTokenizerBase", *, add_generation_prompt: bool
) -> str:
    if not messages:
        return ""
    if not tokenizer.chat_template:
        raise _BadLineError('has chat messages, and the model has no chat template. Give "segments", or text')
    return str(
        tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=add_generation_prompt)
    )


def _checked_messages(messages: Any, key: str) -> list[dict[str, Any]]:
    if not isinstance(messages, list):
        raise _BadLineError(f"{key} is {messages!r}, expected a list of messages")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _BadLineError(f"{key}[{i}] has no role")
        if not isinstance(message.get("content"), str):
            raise _BadLineError(f"{key}[{i}].content is {message.get('content')!r}, expected a string")
    return messages


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


def _join(segments: Sequence[Segment], ids: dict[tuple[str, bool], NDArray[np.int32]], max_tokens: int) -> SftRow:
    encoded = [(ids.get((part.text, part.is_start)), part.weight) for part in segments]
    parts = [(tokens, weight) for tokens, weight in encoded if tokens is not None and len(tokens)]
    if not parts:
        raise _BadLineError("has no text")
    tokens = np.concatenate([part for part, _ in parts])
    weights = np.concatenate([np.full(len(part), weight, np.float32) for part, weight in parts])
    weights[0] = 0.0  # the first token has no context to be predicted from
    if len(tokens) > max_tokens:
        raise _BadLineError(f"has {len(tokens)} tokens, and the model has {max_tokens} positions. Shorten it")
    if not weights.any():
        raise _BadLineError("has no token with a weight above 0: there is nothing to learn from it")
    return SftRow(tokens, weights)


def _max_positions(model_dir: Path) -> int:
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    return int(config.get("max_position_embeddings") or 2**31)
