"""The bundled question-answering scorer: 1 when the last answer in the response is a target, else 0.

Normalisation is SQuAD's, which Search-R1 uses: lower case, no ASCII punctuation, no articles, single spaces. Of two
numbers it leaves the digits: 3.5 would be 35, and -5 would be 5. So two numbers are compared by their value.
"""

import re
import string
from collections.abc import Sequence
from decimal import Decimal

from rewards.labels import targets_of
from rewards.sample import Sample, Score

_NUMBER = re.compile(r"[-+]?(0|[1-9]\d*|[1-9]\d{0,2}(,\d{3})+)(\.\d+)?|[-+]?\.\d+", re.ASCII)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_OPEN, _CLOSE = "<answer>", "</answer>"


async def score_exact_match(samples: Sequence[Sample]) -> list[Score]:
    """Return 1.0 or 0.0 per sample. Raises: SampleError when a label holds no target."""
    scores = []
    for index, sample in enumerate(samples):
        is_match = answer_matches(sample.response, targets_of(sample.label, index))
        scores.append(Score(1.0 if is_match else 0.0))
    return scores


def answer_matches(response: str, targets: Sequence[str]) -> bool:
    """Return whether the response's last `<answer>` equals any target after normalisation. No answer: False."""
    answer = last_answer(response)
    if answer is None:
        return False
    return any(_is_same(answer, target) for target in targets)


def _is_same(answer: str, target: str) -> bool:
    if normalised := normalise(target):
        if (value := _value_of(target)) is not None and (given := _value_of(answer)) is not None:
            return given == value
        return normalise(answer) == normalised
    # Nothing is left of an answer such as the letter A: an empty one would be right.
    return answer.strip().lower() == target.strip().lower()


def _value_of(text: str) -> Decimal | None:
    """Return the value of a number as people write it, None for other texts. Example: "-1,000.50" -> -1000.5"""
    return Decimal(text.replace(",", "")) if _NUMBER.fullmatch(text := text.strip()) else None


def last_answer(response: str) -> str | None:
    """Return the text of the last complete `<answer>..</answer>`, or None. Example: "<answer> B</answer>" -> "B"."""
    end = response.rfind(_CLOSE)
    start = response.rfind(_OPEN, 0, end) if end >= 0 else -1
    return response[start + len(_OPEN) : end].strip() if start >= 0 else None


def normalise(text: str) -> str:
    """Return text as answers are compared. Example: normalise("The U.S.A.") == "usa"."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())
