"""Request and reply bodies of the reward and retrieve services (JSON over HTTP), checked at both ends.

Requests are pydantic models. Replies come from anyone's server, in several shapes, and are read strictly by hand:
what is not exactly a finite number, or not exactly as long as what was asked, is an error and never a value.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import pydantic_core
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator

_Request = TypeVar("_Request", bound=BaseModel)


# Header of a retriever's reply: the digest of what it searched. Services with the same one answer alike.
CONTENT_HASH = "x-content-hash"


class BodyError(ValueError):
    """A body is not what the contract says; `path` names the field, such as `$.rewards[3]`."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path} {problem}")
        self.path = path
        self.problem = problem


class RewardRequest(BaseModel):
    """Samples to score: aligned lists. Keys that are not known are ignored."""

    model_config = ConfigDict(strict=True)

    query: list[str]  # prompt + response
    prompts: list[str] | None = None  # what each query begins with; null: not known
    labels: list[Any] | None = None  # the data rows' labels; null: there are none
    columns: list[dict[str, Any]] | None = None  # the data row's other columns, such as data_source and extra_info

    @model_validator(mode="after")
    def _check_aligned(self) -> Self:
        for name, values in (("prompts", self.prompts), ("labels", self.labels), ("columns", self.columns)):
            if values is not None and len(values) != len(self.query):
                raise ValueError(f"{name} has {len(values)} entries, query has {len(self.query)}")
        return self


class RewardReply(BaseModel):
    """What our reward service answers: one reward per query, and what the scorer gave besides."""

    rewards: list[float]  # one for each query, finite, in their order
    # 0 to 1, one for each query, for filtering; null unless the scorer gave every sample one
    scores: list[float] | None = None
    # name of a number worth a curve -> one for each query; null: there is none that all samples have
    extra_logs: dict[str, list[float] | float] | None = None


class RetrieveRequest(BaseModel):
    """Queries to search for."""

    model_config = ConfigDict(strict=True)

    queries: list[str]  # each is searched for by itself
    # most passages for one query; null: as many as the service was started with
    topk: PositiveInt | None = Field(None, le=1000)
    return_scores: bool = False  # true: each passage comes with its score


@dataclass(frozen=True)
class Passage:
    """One document found for a query."""

    id: str  # the corpus's; empty when the reply has none
    contents: str  # its title in double quotes on the first line, then the text
    score: float | None  # the index's, larger is better; None: the reply has none


def read_request(model: type[_Request], body: bytes) -> _Request:
    """Return the request in `body`. Raises: BodyError naming the first wrong field."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        value = f", got {_short(first['input'])}" if first["loc"] and first["type"] != "missing" else ""
        raise BodyError(_path(first["loc"]), f"{first['msg']}{value}") from None


@dataclass(frozen=True)
class Scored:
    """What a reward service gave one sample."""

    reward: float  # finite
    score: float | None = None  # for filtering, finite; None: the service gave none
    logs: Mapping[str, float] = field(default_factory=dict)  # numbers for curves by name, finite


def read_scored(body: bytes, num_samples: int) -> tuple[Scored, ...]:
    """Return what a service's reply gives each sample.

    `scores` is as strict as `rewards`: groups are filtered by it. Of `extra_logs` what is no number for each sample, or
    one number for all of them, is left out: a log that no curve shows costs no reward.
    Raises: BodyError naming the field for anything that `read_rewards` does not take either.
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
            spread = values if isinstance(values, list) else [values] * num_samples
            for log, value in zip(logs, check_numbers(spread, num_samples, name), strict=True):
                log[name] = value
    return tuple(Scored(*parts) for parts in zip(rewards, scores, logs, strict=True))


def read_rewards(body: bytes, num_samples: int) -> tuple[float, ...]:
    """Return the rewards in a service's reply, one per sample, all finite.

    Accepted: {"rewards": [..]}, and for a single sample also {"rewards": x}, [x] and x.
    Raises: BodyError naming the field for anything else.
    """
    return _rewards_of(_parse(body), num_samples)


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
    """Return a list of exactly num_samples finite numbers as floats. Raises: BodyError naming the wrong entry."""
    numbers = _list(values, path, num_samples, "sample")
    return tuple(_number(value, f"{path}[{i}]") for i, value in enumerate(numbers))


def read_passages(body: bytes, num_queries: int) -> tuple[tuple[Passage, ...], ...]:
    """Return the passages in a retriever's reply, one tuple per query, in the reply's order.

    An item may be {"document": .., "score": ..} or a document alone; a document {"id", "contents"} or plain text.
    Raises: BodyError naming the field for anything else.
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
    return number


def _path(location: tuple[int | str, ...]) -> str:
    return "$" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
