"""The input and output of a scorer. Users' own functions import `Sample` and `Score`."""

import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from protocol.http.bodies import BodyError
from protocol.one_line import one_line

# Length limit of an exception's text: a reply has at most 1 MiB.
_MAX_CHARACTERS = 2000
_SPECIAL_TOKENS = re.compile(r"<\|[^|<>]{1,64}\|>|</?s>|<(?:pad|unk|bos|eos|end_of_turn|start_of_turn)>")


@dataclass(frozen=True)
class Sample:
    """One finished conversation."""

    query: str  # prompt + response, special tokens kept
    prompt: str  # text before the response; empty: not in the request
    response: str  # query without the prompt; the whole query if it does not start with the prompt
    label: Any  # label of the data row, or None
    columns: Mapping[str, Any] = field(default_factory=dict)

    plain_response: str | None = None  # response without control tokens; None: not in the request
    num_turns: int | None = None  # turns that the policy wrote; None: not in the request

    @property
    def text(self) -> str:
        """The response without control tokens.

        If the request lacks it, they are recognised by their form: `<|..|>`, `</s>`, `<eos>` and similar.
        """
        return _SPECIAL_TOKENS.sub("", self.response) if self.plain_response is None else self.plain_response


@dataclass(frozen=True)
class Score:
    """The result of one sample."""

    reward: float  # finite; larger is better
    score: float | None = None  # 0 to 1, for filtering; None: not provided
    logs: Mapping[str, float] = field(default_factory=dict)  # other finite numbers for the report, by name

    def __post_init__(self) -> None:
        """Make plain numbers and names of those of other libraries: a process sends them on as JSON."""
        for name, number in {"reward": self.reward, "score": self.score, **self.logs}.items():
            if number is not None and not math.isfinite(number):
                raise ValueError(f"{name} is {number}, expected a finite number")
        object.__setattr__(self, "reward", float(self.reward))
        object.__setattr__(self, "score", None if self.score is None else float(self.score))
        object.__setattr__(self, "logs", {one_line(str(name)): float(value) for name, value in self.logs.items()})


class SampleError(BodyError):
    """A sample that the caller must fix (status 422). index: position in the request."""

    def __init__(self, index: int, problem: str) -> None:
        super().__init__(f"$.labels[{index}]", problem)
        self.index = index


class ScorerFailure(Exception):
    """A scorer raised or returned an invalid value (status 500).

    index: position of the sample; None: the whole request. place: "FILE:LINE" of the user's code; empty: unknown.
    """

    def __init__(self, index: int | None, kind: str, message: object, place: str = "") -> None:
        message = one_line(message, _MAX_CHARACTERS)
        super().__init__(f"{kind}: {message}" + (f" ({place})" if place else ""))
        self.index, self.kind, self.message, self.place = index, kind, message, place


Scorer = Callable[[Sequence[Sample]], Awaitable[list[Score]]]


@dataclass(frozen=True)
class ServedScorer:
    """A scorer that says what decides its scores."""

    score: Scorer
    digest: str  # of the function's files, or of the bundled scorer's options and model
    files: tuple[str, ...] = ()  # the function's files
    called: str = ""  # the function's name, and what its options decide of its call

    async def __call__(self, samples: Sequence[Sample]) -> list[Score]:
        return await self.score(samples)


def make_sample(
    query: str,
    prompt: str | None,
    label: Any,
    columns: Mapping[str, Any] | None = None,
    plain_response: str | None = None,
    num_turns: int | None = None,
) -> Sample:
    """Return the sample. Without a prompt at the start of the query, the whole query is the response."""
    prompt = prompt or ""
    response = query.removeprefix(prompt)
    return Sample(query, prompt, response, label, columns or {}, plain_response, num_turns)


def targets_of(label: Any, index: int) -> list[str]:
    """Return the accepted answers in a label: text, [text], {"target": ..} or {"ground_truth": {"target": ..}}.

    A whole number in a float column, 72.0, is the answer 72.
    index: position in the request. Raises: SampleError for a label without a target.
    """
    found = label
    for key in ("ground_truth", "target"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    targets = found if isinstance(found, list) else [found]
    if not targets or not all(map(_is_target, targets)):
        raise SampleError(index, f"is {label!r:.80}, expected the answer's text, a list of texts or a target")
    return [_text_of(target) for target in targets]


def _text_of(target: str | float) -> str:
    return str(int(target) if isinstance(target, float) and target.is_integer() else target)


def _is_target(value: Any) -> bool:
    """Return whether a value can be an answer. NaN marks a missing number, which no answer equals."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, str | int) and not isinstance(value, bool)
