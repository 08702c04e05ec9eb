"""Request and reply bodies of the reward and retrieve services (JSON over HTTP), checked at both ends.

Requests are pydantic models. Replies come from users' servers in several forms, and are read strictly by hand:
anything but a finite number, and any other number of entries than requested, is an error and never a value.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import pydantic_core
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator

_Request = TypeVar("_Request", bound=BaseModel)


LARGEST_NUMBER = 1e18  # as in the trajectories that carry the rewards
# Log of a reward: 1 if the reward model reads marks of the policy's chat template as plain text.
FOREIGN_MARKS = "foreign_marks"
CUT_TEXTS = "cut_texts"  # 1 if it did not read the beginning
# Header of a retriever's reply: the digest of its index. Services with equal digests give equal answers.
CONTENT_HASH = "x-content-hash"


class BodyError(ValueError):
    """A body violates the contract; `path` names the field, such as `$.rewards[3]`."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path} {problem}")
        self.path = path
        self.problem = problem


class RewardRequest(BaseModel):
    """Samples to score: aligned lists. Unknown keys are ignored."""

    model_config = ConfigDict(strict=True)

    query: list[str]  # prompt + response
    responses: list[str] | None = None  # the responses without control tokens; null: unknown
    prompts: list[str] | None = None  # the queries' prompts; null: unknown
    labels: list[Any] | None = None  # the data rows' labels; null: no labels
    columns: list[dict[str, Any]] | None = None  # the data rows' other columns, such as data_source and extra_info
    num_turns: list[int] | None = None  # turns that the policy wrote in each sample; null: unknown

    @model_validator(mode="after")
    def _check_aligned(self) -> Self:
        for name in ("responses", "prompts", "labels", "columns", "num_turns"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.query):
                raise ValueError(f"{name} has {len(values)} entries, query has {len(self.query)}")
        return self


class RewardReply(BaseModel):
    """The reply of our reward service: one reward per query, and further values of the scorer."""

    rewards: list[float]  # one finite number for each query, in order
    # 0 to 1, one for each query, for filtering; null unless the scorer gave every sample a score
    scores: list[float] | None = None
    # name of a curve -> a number for each query, null for one without it
    extra_logs: dict[str, list[float | None] | float] | None = None


class RetrieveRequest(BaseModel):
    """Queries to search for."""

    model_config = ConfigDict(strict=True)

    queries: list[str]
    # largest number of passages for one query; null: the service's default
    topk: PositiveInt | None = Field(None, le=1000)
    return_scores: bool = False  # true: each passage has its score


@dataclass(frozen=True)
class Passage:
    """One document found for a query."""

    id: str  # id in the corpus; empty when the reply has none
    contents: str  # title in double quotes on the first line, then the text
    score: float | None  # score of the index, larger is better; None: the reply has none


def read_request(model: type[_Request], body: bytes) -> _Request:
    """Return the request in `body`. Raises: BodyError naming the first wrong field."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        value = f", got {_short(first['input'])}" if first["loc"] and first["type"] != "missing" else ""
        raise BodyError(_path(first["loc"]), f"{first['msg']}{value}") from None


@dataclass(frozen=True)
class SampleScore:
    """A reward service's reply for one sample."""

    reward: float  # finite
    score: float | None = None  # finite score for filtering; None: the reply has none
    logs: Mapping[str, float] = field(default_factory=dict)  # name of a curve -> finite number


def read_scores(body: bytes, num_samples: int) -> tuple[SampleScore, ...]:
    """Return the reward, score and logs of each sample in a service's reply.

    rewards: {"rewards": [..]}, and for a single sample also {"rewards": x}, [x] and x.
    scores: as strict as rewards, because groups are filtered by them.
    extra_logs: a number or null for each sample, or a number for all; other values are ignored, since they affect no
    reward.
    Raises: BodyError naming the wrong field.
    """
    reply = _parse(body)
    rewards = _rewards_of(reply, num_samples)
    fields = reply if isinstance(reply, dict) else {}
    scores: Sequence[float | None] = [None] * num_samples
    if fields.get("scores") is not None:
        given = fields["scores"]
        scores = check_numbers(given if isinstance(given, list) else [given], num_samples, "$.scores")
    logs: list[dict[str, float]] = [{} for _ in range(num_samples)]
    named = fields.get("extra_logs")
    for name, values in named.items() if isinstance(named, dict) else ():
        with suppress(BodyError):
            spread = _list(values if isinstance(values, list) else [values] * num_samples, name, num_samples, "sample")
            numbers = [None if value is None else _number(value, name) for value in spread]
            for log, number in zip(logs, numbers, strict=True):
                if number is not None:
                    log[name] = number
    return tuple(SampleScore(*parts) for parts in zip(rewards, scores, logs, strict=True))


def _rewards_of(reply: Any, num_samples: int) -> tuple[float, ...]:
    path = "$"
    if isinstance(reply, dict):
        path = "$.rewards"
        if "rewards" not in reply:
            raise BodyError(path, f"is missing; the reply has the keys {sorted(reply)[:8]}")
        reply = reply["rewards"]
    if num_samples == 1 and not isinstance(reply, list):
        return (_number(reply, path),)
    return check_numbers(reply, num_samples, path)


def check_numbers(values: Any, num_samples: int, path: str) -> tuple[float, ...]:
    """Return exactly num_samples finite numbers as floats. Raises: BodyError naming the wrong entry."""
    numbers = _list(values, path, num_samples, "sample")
    return tuple(_number(value, f"{path}[{i}]") for i, value in enumerate(numbers))


def read_passages(body: bytes, num_queries: int) -> tuple[tuple[Passage, ...], ...]:
    """Return the passages in a retriever's reply, one tuple per query, in the reply's order.

    An item may be {"document": .., "score": ..} or a document alone; a document {"id", "contents"} or plain text.
    Raises: BodyError naming the wrong field.
    """
    reply = _parse(body)
    if not isinstance(reply, dict) or "result" not in reply:
        raise BodyError("$.result", "is missing")
    found = _list(reply["result"], "$.result", num_queries, "query")
    return tuple(
        tuple(_passage(item, f"$.result[{i}][{j}]") for j, item in enumerate(_list(items, f"$.result[{i}]")))
        for i, items in enumerate(found)
    )


def _passage(item: Any, path: str) -> Passage:
    score = None
    document = item
    if isinstance(item, dict) and "document" in item:
        document, path = item["document"], f"{path}.document"
        if item.get("score") is not None:
            score = _number(item["score"], path.removesuffix("document") + "score")
    if isinstance(document, str):
        return Passage("", document, score)
    if not isinstance(document, dict):
        raise BodyError(path, f"is {_short(document)}, expected a document")
    contents = document.get("contents")
    if not isinstance(contents, str):
        raise BodyError(f"{path}.contents", f"is {_short(contents)}, expected a string")
    return Passage(str(document.get("id", "")), contents, score)


def _parse(body: bytes) -> Any:
    try:
        return pydantic_core.from_json(body)
    except ValueError as error:
        raise BodyError("$", f"is not JSON ({error}): {_short(body.decode(errors='replace'))}") from None


def _list(value: Any, path: str, length: int | None = None, of: str = "") -> list[Any]:
    if not isinstance(value, list):
        raise BodyError(path, f"is {_short(value)}, expected a list")
    if length is not None and len(value) != length:
        raise BodyError(path, f"has {len(value)} entries, expected {length} (one per {of})")
    return value


def _number(value: Any, path: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BodyError(path, f"is {_short(value)}, expected a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise BodyError(path, f"is {number}, expected a finite number")
    if abs(number) > LARGEST_NUMBER:
        raise BodyError(path, f"is {number:g}, expected at most {LARGEST_NUMBER:g} either way")
    return number


def _path(location: tuple[int | str, ...]) -> str:
    return "$" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
