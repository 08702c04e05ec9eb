"""What a scorer is given and what it returns. Users' own functions import `Sample` and `Score` from here."""

import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from protocol.http.bodies import BodyError
from protocol.one_line import one_line

# Of an exception's text; a reply has at most 1 MiB.
_MAX_CHARACTERS = 2000
_SPECIAL_TOKENS = re.compile(r"<\|[^|<>]{1,64}\|>|</?s>|<(?:pad|unk|bos|eos|end_of_turn|start_of_turn)>")


@dataclass(frozen=True)
class Sample:
    """One finished conversation."""

    query: str  # prompt + response, special tokens kept
    prompt: str  # what the policy read first; empty: the request does not say
    response: str  # query without the prompt; all of it, when it does not begin with the prompt
    label: Any  # the data row's, or None
    columns: Mapping[str, Any] = field(default_factory=dict)  # the data row's other columns

    @property
    def text(self) -> str:
        """The response without special tokens, which are told by their form: `<|..|>`, `</s>`, `<eos>` and such."""
        return _SPECIAL_TOKENS.sub("", self.response)


@dataclass(frozen=True)
class Score:
    """What a scorer returns for one sample."""

    reward: float  # finite; the larger the better
    score: float | None = None  # 0 to 1, for filtering; None: the scorer has none
    logs: Mapping[str, float] = field(default_factory=dict)  # other numbers worth a curve, by name; finite

    def __post_init__(self) -> None:
        for name, number in {"reward": self.reward, "score": self.score, **self.logs}.items():
            if number is not None and not math.isfinite(number):
                raise ValueError(f"{name} is {number}, expected a finite number")


class SampleError(BodyError):
    """One sample cannot be scored, and the caller can fix that (status 422): `index` says which one of the request."""

    def __init__(self, index: int, problem: str) -> None:
        super().__init__(f"$.labels[{index}]", problem)
        self.index = index


class ScorerFailure(Exception):
    """A scorer raised or returned nonsense for a sample (status 500); index None: for the request as a whole."""

    def __init__(self, index: int | None, error: BaseException) -> None:
        super().__init__(f"{type(error).__name__}: {one_line(error, _MAX_CHARACTERS)}")
        self.index = index
        self.error = error


Scorer = Callable[[Sequence[Sample]], Awaitable[list[Score]]]


def make_sample(query: str, prompt: str | None, label: Any, columns: Mapping[str, Any] | None = None) -> Sample:
    """Return the sample; without a prompt, or with one that the query does not start with, all of it is response."""
    prompt = prompt or ""
    response = query.removeprefix(prompt)
    return Sample(query, prompt, response, label, columns or {})
