"""Sample trajectories as text, in pieces: prompt, the model's words, observations."""

from dataclasses import dataclass
from itertools import accumulate, groupby
from pathlib import Path
from typing import Literal

import msgspec

from learner.data.text_decoder import TextDecoder

Author = Literal["prompt", "model", "observation"]


class SampleLine(msgspec.Struct, frozen=True):
    """One line of samples.jsonl."""

    step: int
    group: str
    reward: float
    reward_parts: dict[str, float]  # reward by endpoint name, or environment
    staleness: int  # policy versions between its oldest token and the step
    finish: str  # answer, stop, length, turns or context
    num_prompt_tokens: int
    tokens: list[int]  # [T] prompt, turns and observations
    loss_mask: list[int]  # [T] 1 where the model wrote the token, else 0
    label: str = ""


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of one author, as text."""

    author: Author
    text: str  # control characters as visible symbols; token ids without a tokenizer


@dataclass(frozen=True)
class ReadableSample:
    """A trajectory as text."""

    line: SampleLine
    pieces: list[Piece]  # the conversation, in order


def read_samples(path: Path, tokenizer_dir: Path | None, num_samples: int, notes: list[str]) -> list[ReadableSample]:
    """Return up to num_samples trajectories spread evenly over the run, oldest first; problems are added to notes."""
    if not path.exists():
        notes.append("samples.jsonl is missing: there are no trajectories to read.")
        return []
    decoder = TextDecoder(tokenizer_dir)
    if decoder.problem is not None:
        notes.append(decoder.problem)
    samples = []
    for text in _choose_lines(path, num_samples):
        try:
            line = msgspec.json.decode(text, type=SampleLine)
        except msgspec.DecodeError:
            notes.append("samples.jsonl has a broken line, left out (a kill cuts a line off).")
            continue
        samples.append(ReadableSample(line, split_text(line, decoder)))
    return samples


def split_text(line: SampleLine, decoder: TextDecoder) -> list[Piece]:
    """Return the trajectory's text in pieces by author."""
    authors: list[Author] = [
        "model" if is_model else "prompt" if index < line.num_prompt_tokens else "observation"
        for index, is_model in enumerate(line.loss_mask)
    ]
    runs = [(author, len(list(run))) for author, run in groupby(authors)]
    texts = decoder.texts(line.tokens, list(accumulate(length for _, length in runs)))
    return [Piece(author, _visible(text)) for (author, _), text in zip(runs, texts, strict=True)]


def _choose_lines(path: Path, num: int) -> list[bytes]:
    """Return lines spread evenly over the file, with the first and the last."""
    lines = path.read_bytes().splitlines()
    return (
        [lines[i] for i in sorted({round(i * (len(lines) - 1) / max(1, num - 1)) for i in range(num)})] if lines else []
    )


def _visible(text: str) -> str:
    """Return text with control characters as visible symbols: HTML does not allow most of them."""
    return "".join(chr(0x2400 + ord(c)) if ord(c) < 32 and c not in "\n\t" else c for c in text)
