"""Sample trajectories as text, in pieces: prompt, the model's words, observations."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal

import msgspec
from tokenizers import Tokenizer

Author = Literal["prompt", "model", "observation"]


class SampleLine(msgspec.Struct, frozen=True):
    """One line of samples.jsonl."""

    step: int  # step that trained it
    group: str  # name of its group
    reward: float  # reward in training
    reward_parts: dict[str, float]  # reward by endpoint name, or environment
    staleness: int  # policy versions between its oldest token and the step
    finish: str  # answer, stop, length, turns or context
    num_prompt_tokens: int  # tokens of the prompt, at the start
    tokens: list[int]  # [T] prompt, turns and observations
    loss_mask: list[int]  # [T] 1 where the model wrote the token, else 0


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of one author, as text."""

    author: Author
    text: str  # control characters as visible symbols; token ids without a tokenizer


@dataclass(frozen=True)
class ReadableSample:
    """A trajectory as text."""

    line: SampleLine  # line of the file
    pieces: list[Piece]  # the conversation, in order


def read_samples(path: Path, tokenizer_dir: Path | None, num_samples: int, notes: list[str]) -> list[ReadableSample]:
    """Return up to num_samples trajectories spread evenly over the run, oldest first; problems are added to notes."""
    if not path.exists():
        notes.append("samples.jsonl is missing: there are no trajectories to read.")
        return []
    tokenizer = _open_tokenizer(tokenizer_dir, notes)
    samples = []
    for text in _choose_lines(path, num_samples):
        try:
            line = msgspec.json.decode(text, type=SampleLine)
        except msgspec.DecodeError:
            notes.append("samples.jsonl has a broken line, left out (a kill cuts a line off).")
            continue
        samples.append(ReadableSample(line, split_text(line, tokenizer)))
    return samples


def split_text(line: SampleLine, tokenizer: Tokenizer | None) -> list[Piece]:
    """Return the trajectory's text in pieces by author; without a tokenizer as token ids.

    A piece is the difference between two decoded prefixes: some tokenizers drop the leading space of a piece that is
    decoded alone.
    """
    authors: list[Author] = [
        "model" if is_model else "prompt" if index < line.num_prompt_tokens else "observation"
        for index, is_model in enumerate(line.loss_mask)
    ]
    pieces: list[Piece] = []
    before, end = "", 0
    for author, run in groupby(authors):
        start, end = end, end + len(list(run))
        if tokenizer is None:
            pieces.append(Piece(author, " ".join(map(str, line.tokens[start:end])) + " "))
            continue
        after = _decode(tokenizer, line.tokens[:end])
        # A character with bytes in both pieces changes the earlier text: then the piece is decoded alone.
        text = after[len(before) :] if after.startswith(before) else _decode(tokenizer, line.tokens[start:end])
        pieces.append(Piece(author, _visible(text)))
        before = after
    return pieces


def _choose_lines(path: Path, num: int) -> list[bytes]:
    """Return lines spread evenly over the file, with the first and the last."""
    lines = path.read_bytes().splitlines()
    return (
        [lines[i] for i in sorted({round(i * (len(lines) - 1) / max(1, num - 1)) for i in range(num)})] if lines else []
    )


def _open_tokenizer(folder: Path | None, notes: list[str]) -> Tokenizer | None:
    path = folder / "tokenizer.json" if folder else None
    if path is None or not path.is_file():
        notes.append(f"{path or 'tokenizer.json'} is not there: trajectories are shown as token ids.")
        return None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # `tokenizers` raises Exception itself for an invalid file
        notes.append(f"{path} is not a tokenizer ({error}): trajectories are shown as token ids.")
        return None


def _decode(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    return str(tokenizer.decode(list(tokens), skip_special_tokens=False))


def _visible(text: str) -> str:
    """Return text with control characters as visible symbols: HTML does not allow most of them."""
    return "".join(chr(0x2400 + ord(c)) if ord(c) < 32 and c not in "\n\t" else c for c in text)
