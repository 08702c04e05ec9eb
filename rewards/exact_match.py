"""The bundled question-answering scorer: 1 when the last answer in the response is a target, else 0.

Normalisation is SQuAD's, which Search-R1 uses: lower case, no ASCII punctuation, no articles, single spaces.
"""

import re
import string
from collections.abc import Sequence

from rewards.labels import targets_of
from rewards.sample import Sample, Score

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
        return normalise(answer) == normalised
    # Nothing is left of an answer such as the letter A: an empty one would be right.
    return answer.strip().lower() == target.strip().lower()


def last_answer(response: str) -> str | None:
    """Return the text of the last complete `<answer>..</answer>`, or None. Example: "<answer> B</answer>" -> "B"."""
    end = response.rfind(_CLOSE)
    start = response.rfind(_OPEN, 0, end) if end >= 0 else -1
    return response[start + len(_OPEN) : end].strip() if start >= 0 else None


def normalise(text: str) -> str:
    """Return text as answers are compared. Example: normalise("The U.S.A.") == "usa"."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())
