"""A file of answers: for each prompt of a data set a JSON line with its samples, the model and the settings behind it.

Lines are appended as prompts come back, and sorted at the end. A line that a kill cut off does not count, and of two
lines of a row the first does.
"""

import contextlib
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from learner.data.prompt_set import uid_at
from learner.data.prompts import Prompt
from protocol.disk.files import naming_disk_errors, replacing
from protocol.errors import OperatorError


class Origin(NamedTuple):
    """What decides the samples of a prompt."""

    weights: str  # digests of the model's weights and of its other files
    sampled_by: str  # digest of dtype, sampling, environment, rewards, scorers and number of samples; space, seed


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One answer, or conversation, of the model."""

    text: str  # everything after the prompt, without the end token
    reward: float
    parts: dict[str, float]  # reward by endpoint, or "environment"
    finish: str  # as in `TrajectoryFacts`
    tokens: list[int]  # prompt, turns and replies
    learnt: list[tuple[int, int]]  # [start, end) of the tokens that the model wrote

    @property
    def is_cut(self) -> bool:
        """Whether a limit ended it: it does not show how an answer ends."""
        return self.finish not in ("answer", "stop")

    @property
    def loss_mask(self) -> list[int]:
        mask = [0] * len(self.tokens)
        for start, end in self.learnt:
            mask[start:end] = [1] * (end - start)
        return mask


class _Head(msgspec.Struct, frozen=True, kw_only=True):
    row: int  # place of the prompt in its data set, from 0
    uid: str  # hash of file name, row, prompt and label
    weights: str  # as in `Origin`
    sampled_by: str


class Answers(_Head, frozen=True, kw_only=True):
    """One line."""

    prompt: Any  # text or messages
    label: Any = None
    besides: str | None = None  # setting that gives the model more than the prompt; None: no such setting
    samples: list[Sample]  # fewer than asked for if the prompt failed
    failed: str | None = None  # why samples are missing


def read_answers(path: Path) -> Iterator[Answers]:
    """Yield each row's answers, in the order of the file. Raises: OperatorError when it or a line cannot be read."""
    rows = set[int]()
    with _naming_disk_errors(path), path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                answers = msgspec.json.decode(line, type=Answers)
            except msgspec.DecodeError:
                raise OperatorError(
                    f"{path}:{number} is not a whole line of sluice generate. Give its command again, or another file."
                ) from None
            if answers.row not in rows:
                rows.add(answers.row)
                yield answers


def rows_of(path: Path, origin: Origin, prompts: Sequence[Prompt]) -> set[int]:
    """Return the rows that have a line. Raises: OperatorError for one of another model, other settings or prompts."""
    rows = set()
    for head, *_ in _lines(path) if path.exists() else ():
        uid = uid_at(prompts, head.row) if head.row < len(prompts) else ""
        for name, is_same in (
            ("another model, tokenizer or template", head.weights == origin.weights),
            ("other settings", head.sampled_by == origin.sampled_by),
            ("other prompts", head.uid == uid),
        ):
            if not is_same:
                raise OperatorError(
                    f"{path} holds answers of {name}, in the line of row {head.row}. Give another file, or the "
                    "command that began this one."
                )
        rows.add(head.row)
    return rows


def find_difference(path: Path, earlier: Path) -> str | None:
    """Return what decided the samples of two sorted files otherwise, apart from weights and seed; None: nothing."""
    for one, other in zip_longest(*((head for head, *_ in _lines(each)) for each in (path, earlier))):
        if one is None or other is None or (one.row, one.uid) != (other.row, other.uid):
            return "prompts"
        if one.sampled_by.split()[0] != other.sampled_by.split()[0]:
            return "settings, scorers or tools"
    return None


def append_answers(path: Path, answers: Answers) -> None:
    """Append a line, which a kill of this process leaves whole or cut off. Raises: OperatorError."""
    with _naming_disk_errors(path), path.open("ab+") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - 1))
        end = b"\n" if file.read(1) not in (b"", b"\n") else b""  # behind a line that was cut off
        file.write(end + msgspec.json.encode(answers, enc_hook=str) + b"\n")


def sort_answers(path: Path) -> None:
    """Put the lines into the order of their rows, each row once. Raises: OperatorError."""
    places = sorted((head.row, offset, len(line)) for head, offset, line in _lines(path))
    with _naming_disk_errors(path), path.open("rb") as file, replacing(path) as aside, aside.open("wb") as in_order:
        for _, offset, size in places:
            file.seek(offset)
            in_order.write(file.read(size))


def _lines(path: Path) -> Iterator[tuple[_Head, int, bytes]]:
    """Yield each row's first whole line, with its place in the file."""
    rows, offset = set[int](), 0
    with _naming_disk_errors(path), path.open("rb") as file:
        for line in file:
            with contextlib.suppress(msgspec.DecodeError):
                head = msgspec.json.decode(line, type=_Head)
                if line.endswith(b"\n") and head.row not in rows:
                    rows.add(head.row)
                    yield head, offset, line
            offset += len(line)


def _naming_disk_errors(path: Path) -> contextlib.AbstractContextManager[None]:
    return naming_disk_errors(f"{path} cannot be read or written", "Free the disk, or give another file.")
