"""Answers of evaluations.jsonl."""

from collections.abc import Collection
from pathlib import Path

import msgspec


class Answer(msgspec.Struct, frozen=True):
    """One answer to a held-out prompt."""

    step: int
    uid: str
    reward: float
    set: str = ""
    sample: int = 0
    is_greedy: bool = False
    prompt: str = ""
    response: str = ""
    label: str = ""


class _Place(msgspec.Struct, frozen=True):
    step: int
    set: str = ""


def read_answers(path: Path, steps: Collection[int]) -> dict[int, list[Answer]]:
    """Return the answers of the evaluations of these steps, of the first set alone, in the order of their prompts.

    Broken lines are skipped. If a start repeated an evaluation, its last answers count.
    """
    by_step: dict[int, dict[tuple[str, int], Answer]] = {step: {} for step in steps}
    main_set = None
    with path.open("rb") as file:
        for text in file:
            try:
                place = msgspec.json.decode(text, type=_Place)
                main_set = place.set if main_set is None else main_set
                if place.step in by_step and place.set == main_set:
                    answer = msgspec.json.decode(text, type=Answer)
                    by_step[place.step][answer.uid, answer.sample] = answer
            except msgspec.DecodeError:
                continue
    return {step: list(answers.values()) for step, answers in by_step.items()}
