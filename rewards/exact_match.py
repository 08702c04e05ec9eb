"""The bundled question-answering scorer: 1 if the last answer in the response equals a target, else 0.

Normalisation is SQuAD's, as in Search-R1: lower case, no ASCII punctuation, no articles, single spaces. It would turn
3.5 into 35, 1/2 into 12 and -5 into 5, so signs of numbers stay, and numbers are compared by value.
"""

import re
import string
from collections.abc import Sequence
from decimal import Decimal
from unicodedata import normalize

from rewards.sample import Sample, Score, targets_of

_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?|-?\.\d+", re.ASCII)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_OF_NO_VALUE = str.maketrans("", "", "$%*_`\\")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_SIGN = re.compile(r"(?<=\d)[./:^,-](?=\d)|(?<![\w.])-(?=\.?\d)|(?<!\w)\.(?=\d)")
_OPEN, _CLOSE = "<answer>", "</answer>"


async def score_exact_match(samples: Sequence[Sample]) -> list[Score]:
    """Return 1.0 or 0.0 per sample. Raises: SampleError for a label without a target."""
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
    # One letter with an accent has two spellings in Unicode, and tokenizers write the first.
    return any(_is_same(*(normalize("NFC", text) for text in (answer, target))) for target in targets)


def _is_same(answer: str, target: str) -> bool:
    if normalise(target):
        given, wanted = _words_of(answer), _words_of(target)
        return len(given) == len(wanted) and all(map(_is_same_word, given, wanted))
    # Normalisation removes an answer such as the letter A, and an empty answer would match.
    return _bare(answer) == _bare(target)


def _bare(text: str) -> str:
    """Return the text without punctuation around it, or as it is where nothing else is left. Example: (A). -> a"""
    text = text.strip().lower()
    return text.strip(string.punctuation + string.whitespace) or text


def _words_of(text: str) -> list[str]:
    """Return the normalised words, with the signs of numbers. Example: "The -$1,000.50!" -> ["-1000.50"]"""
    text = _THOUSANDS.sub("", text.translate(_OF_NO_VALUE).lower())
    kept = (each if each not in string.punctuation or _SIGN.match(text, at) else "" for at, each in enumerate(text))
    return _ARTICLES.sub(" ", "".join(kept)).split()


def _is_same_word(one: str, other: str) -> bool:
    return one == other or bool(_NUMBER.fullmatch(one) and _NUMBER.fullmatch(other) and Decimal(one) == Decimal(other))


def last_answer(response: str) -> str | None:
    """Return the text of the last complete `<answer>..</answer>`, or None. Example: "<answer> B</answer>" -> "B"."""
    end = response.rfind(_CLOSE)
    start = response.rfind(_OPEN, 0, end) if end >= 0 else -1
    return response[start + len(_OPEN) : end].strip() if start >= 0 else None


def normalise(text: str) -> str:
    """Return the normalised text. Example: normalise("The U.S.A.") == "usa"."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())
