"""What the policy says: groups of trained trajectories in pieces, and held-out answers first and last."""

import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec

from learner.data.text_decoder import TextDecoder
from learner.disk.run_folder import Answer, SamplePlace, read_answers

Author = Literal["prompt", "model", "observation"]
Change = Literal["better", "worse", "equal"]

_NUM_GROUPS = 6
# Held-out prompts that are shown, of each kind.
_SHOWN: dict[Change, int] = {"better": 2, "worse": 1, "equal": 1}


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
    start: float = 0.0  # as in SamplePlace


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of one author, as text."""

    author: Author
    text: str  # control characters as visible symbols; token ids without a tokenizer


@dataclass(frozen=True)
class ReadableSample:
    """A trajectory as text."""

    line: SampleLine
    pieces: list[Piece]  # the conversation after the prompt, in order


@dataclass(frozen=True)
class ReadableGroup:
    """The recorded trajectories of one prompt in one step, best first."""

    step: int
    prompt: str
    label: str
    mean: float  # reward
    samples: list[ReadableSample]


@dataclass(frozen=True)
class HeldOutPair:
    """The greedy answers to one held-out prompt at two evaluations."""

    change: Change  # of the reward
    before: Answer
    after: Answer


def read_groups(path: Path, tokenizer_dir: Path | None, notes: list[str]) -> list[ReadableGroup]:
    """Return up to six groups spread evenly over the run, oldest first, whole ones if there are some.

    Problems are added to notes.
    """
    if not path.exists():
        notes.append("samples.jsonl is missing: there are no trajectories to read.")
        return []
    decoder = TextDecoder(tokenizer_dir)
    if decoder.problem is not None:
        notes.append(decoder.problem)
    groups: dict[tuple[int, str], list[int]] = {}  # where their lines begin: all lines may be too large for the memory
    newest, begin = SamplePlace(0, 0.0), 0
    with path.open("rb") as file:
        for text in file:
            try:
                line = msgspec.json.decode(text, type=SampleLine)
            except msgspec.DecodeError:
                notes.append("samples.jsonl has a broken line, left out (a kill cuts a line off).")
            else:
                place = SamplePlace(line.step, line.start)
                if place.repeats(newest):  # steps that are repeated after a resume count once
                    groups = {key: begins for key, begins in groups.items() if key[0] < line.step}
                groups.setdefault((line.step, line.group), []).append(begin)
                newest = place
            begin += len(text)
        largest = max(map(len, groups.values()), default=0)
        whole = [begins for begins in groups.values() if len(begins) == largest]
        spread = sorted({round(i * (len(whole) - 1) / (_NUM_GROUPS - 1)) for i in range(_NUM_GROUPS)}) if whole else []
        return [_read_group(file, whole[index], decoder) for index in spread]


def pair_answers(path: Path, first: int, last: int, held_out: str) -> tuple[Counter[Change], list[HeldOutPair]]:
    """Return how many greedy answers to a held-out set changed from the first to the last evaluation, and some of them.

    The prompts that are shown are the first of each kind. Without two evaluations there are none.
    """
    if first == last or not path.exists():
        return Counter(), []
    read = read_answers(path, {first, last}, held_out)
    before, after = ({each.uid: each for each in read[step] if each.is_greedy} for step in (first, last))
    pairs = [HeldOutPair(_change(before[uid], after[uid]), before[uid], after[uid]) for uid in before if uid in after]
    shown = [pair for change, most in _SHOWN.items() for pair in [p for p in pairs if p.change == change][:most]]
    return Counter(pair.change for pair in pairs), shown


def split_text(line: SampleLine, decoder: TextDecoder) -> list[Piece]:
    """Return the trajectory's text in pieces by author."""
    authors: list[Author] = [
        "model" if is_model else "prompt" if index < line.num_prompt_tokens else "observation"
        for index, is_model in enumerate(line.loss_mask)
    ]
    runs = [(author, len(list(run))) for author, run in groupby(authors)]
    texts = decoder.texts(line.tokens, list(accumulate(length for _, length in runs)))
    return [Piece(author, visible(text)) for (author, _), text in zip(runs, texts, strict=True)]


def visible(text: str) -> str:
    """Return text with control characters as visible symbols: HTML does not allow most of them."""
    return "".join(chr(0x2400 + ord(c)) if ord(c) < 32 and c not in "\n\t" else c for c in text)


def _read_group(file: BinaryIO, begins: Sequence[int], decoder: TextDecoder) -> ReadableGroup:
    decoded = [_line_at(file, begin) for begin in begins]
    lines = sorted(decoded, key=operator.attrgetter("reward"), reverse=True)
    pieces = [split_text(line, decoder) for line in lines]
    prompt = "".join(piece.text for piece in pieces[0] if piece.author == "prompt")
    samples = [
        ReadableSample(line, [piece for piece in parts if piece.author != "prompt"])
        for line, parts in zip(lines, pieces, strict=True)
    ]
    mean = sum(line.reward for line in lines) / len(lines)
    return ReadableGroup(lines[0].step, prompt, lines[0].label, mean, samples)


def _line_at(file: BinaryIO, begin: int) -> SampleLine:
    file.seek(begin)
    return msgspec.json.decode(file.readline(), type=SampleLine)


def _change(before: Answer, after: Answer) -> Change:
    return "better" if after.reward > before.reward else "worse" if after.reward < before.reward else "equal"
