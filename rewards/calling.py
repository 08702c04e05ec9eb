"""How reward functions are called in OpenRLHF, verl, Search-R1, TRL and here: their arguments and results.

The parameters' names determine the form.
"""

import asyncio
import inspect
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from protocol.http.bodies import check_numbers
from rewards.sample import Sample, Score

Call = Callable[..., Awaitable[Any]]  # the user's function, made async
_OPENRLHF_NAMES = ("queries", "prompts", "labels")
_VERL_TEXTS = ("solution_str", "model_output")
_TRL_NAMES = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
# Names of the label's column in the rows of TRL's users.
LABEL_NAMES = ("answer", "solution", "ground_truth", "label", "labels", "target")
_VERL_NAMES = {"data_source", "ground_truth", "extra_info"}
_VERL_PLURALS = {"data_source": "data_sources", "solution_str": "solution_strs", "ground_truth": "ground_truths",
                 "extra_info": "extra_infos"}  # fmt: skip
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class Form:
    """One calling convention."""

    takes_batch: bool  # whether all samples of a request go into one call; otherwise a call has one sample
    score: Callable[[Call, Sequence[Sample]], Awaitable[list[Score]]]


def form_of(function: Callable[..., Any], reads: str, label_name: str = "") -> Form | None:
    """Return how the function is called, or None if its parameters are not known.

    reads: what a verl function gets: response, or sequence (prompt and response with special tokens, as in Search-R1);
    what a TRL function gets: text, or messages. label_name: a TRL function's parameter for the label; empty: the usual.
    """
    parameters = inspect.signature(function).parameters
    outer = inspect.signature(function)
    with suppress(ValueError):  # lru_cache has none of its own
        outer = inspect.signature(function, follow_wrapped=False)  # a decorator may fill parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    required = [name for name, each in parameters.items() if each.default is each.empty and each.kind not in _VARIADIC]
    if "queries" in parameters:
        if set(_OPENRLHF_NAMES) <= set(parameters) and _takes(outer, **dict.fromkeys(_OPENRLHF_NAMES)):
            return Form(True, partial(_score_openrlhf, are_named=True))
        places = zip(parameters, _OPENRLHF_NAMES, strict=False)
        is_in_order = all(name == usual or name not in _OPENRLHF_NAMES for name, usual in places)
        is_called = is_in_order and _takes(outer, *_OPENRLHF_NAMES)
        return Form(True, partial(_score_openrlhf, are_named=False)) if is_called else None
    if "completions" in parameters or "completion_ids" in parameters:
        return Form(True, _TrlForm(parameters, required, reads == "messages", label_name).score)
    is_named = _takes(outer, **dict.fromkeys(required))  # no parameter is positional only
    if "solution_strs" in parameters and {*required} <= {*_VERL_PLURALS.values()} and is_named:
        return Form(True, _VerlForm(parameters, takes_any, reads == "sequence").score_batch)
    if any(name in parameters for name in _VERL_TEXTS) and {*required} <= {*_VERL_NAMES, *_VERL_TEXTS} and is_named:
        return Form(False, _VerlForm(parameters, takes_any, reads == "sequence").score)
    if len(required) == 1 and _takes(outer, None):
        return Form(False, _score_own)
    return None


def _takes(signature: inspect.Signature, *args: Any, **kwargs: Any) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def as_async(function: Callable[..., Any]) -> Call:
    called = (inspect.unwrap(function), getattr(function, "__call__", None))  # noqa: B004 (a method, not a question)
    is_async = any(map(inspect.iscoroutinefunction, called))

    async def run(*args: Any, **kwargs: Any) -> Any:
        with nullcontext() if is_async else _hidden_loop():
            returned = function(*args, **kwargs)
        # A sync function may return an awaitable.
        return await returned if inspect.isawaitable(returned) else returned

    return run


@contextmanager
def _hidden_loop() -> Iterator[None]:
    """Hide the running event loop from a sync function, which may run one of its own, as with `asyncio.run`.

    Its own framework calls it outside of any. Functions that catch errors would return 0 here.
    """
    ours = asyncio.get_running_loop()
    if _own_loop().is_closed():
        _own_loop.cache_clear()
    asyncio._set_running_loop(None)
    asyncio.set_event_loop(_own_loop())
    try:
        yield
    finally:
        asyncio.set_event_loop(ours)
        asyncio._set_running_loop(ours)


@cache
def _own_loop() -> asyncio.AbstractEventLoop:
    """Return what `asyncio.get_event_loop` gives the user's functions."""
    return asyncio.new_event_loop()


async def _score_openrlhf(call: Call, samples: Sequence[Sample], *, are_named: bool) -> list[Score]:
    """are_named: the function has OpenRLHF's names, in any order."""
    given = [s.query for s in samples], [s.prompt for s in samples], [s.label for s in samples]
    named = dict(zip(_OPENRLHF_NAMES, given, strict=True))
    returned = await (call(**named) if are_named else call(*given))
    parts = returned if isinstance(returned, Mapping) else {"rewards": returned}
    num = len(samples)
    rewards = check_numbers(_flat(parts.get("rewards")), num, "rewards")
    scores: Sequence[float | None] = [None] * num
    if parts.get("scores") is not None:
        scores = check_numbers(_flat(parts["scores"]), num, "scores")
    logs: list[dict[str, float]] = [{} for _ in samples]
    for name, values in (parts.get("extra_logs") or {}).items():
        flat = _flat(values)
        for log, value in zip(logs, check_numbers(flat * num if len(flat) == 1 else flat, num, name), strict=True):
            log[str(name)] = value
    return [Score(*each) for each in zip(rewards, scores, logs, strict=True)]


async def _score_own(call: Call, samples: Sequence[Sample]) -> list[Score]:
    return [_verl_score(await call(samples[0]))]


class _VerlForm:
    """verl's keywords. ground_truth: the label's ground_truth, or the label itself.

    data_source and extra_info come from the label if it has them, else from the row's columns.
    """

    def __init__(self, parameters: Mapping[str, Any], takes_any: bool, reads_sequence: bool) -> None:
        self._names = set(parameters)
        self._takes_any = takes_any
        self._reads_sequence = reads_sequence

    async def score(self, call: Call, samples: Sequence[Sample]) -> list[Score]:
        return [_verl_score(await call(**self._chosen(self._row(samples[0]))))]

    async def score_batch(self, call: Call, samples: Sequence[Sample]) -> list[Score]:
        rows = [self._row(sample) for sample in samples]
        lists = {many: [row[one] for row in rows] for one, many in _VERL_PLURALS.items()}
        returned = await call(**self._chosen(lists))
        values = list(returned) if isinstance(returned, list | tuple) else _flat(returned)
        if len(values) != len(samples):
            check_numbers(values, len(samples), "the returned list")
        return [_verl_score(value) for value in values]

    def _row(self, sample: Sample) -> dict[str, Any]:
        part = sample.label if isinstance(sample.label, dict) and "ground_truth" in sample.label else {}
        row = {**sample.columns, **part}
        text = sample.query if self._reads_sequence else sample.text
        # verl counts messages: the policy's turns, the replies between them and the prompt.
        turns = {} if sample.num_turns is None else {"num_turns": 2 * sample.num_turns}
        return {
            "data_source": row.get("data_source") or "",
            **({"model_output": text} if "model_output" in self._names else {"solution_str": text}),
            "ground_truth": part.get("ground_truth", sample.label),
            "extra_info": {**(row.get("extra_info") or {}), **turns},
        }

    def _chosen(self, given: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in given.items() if self._takes_any or name in self._names}


class _TrlForm:
    """TRL's keywords: prompts, completions and each column of the data rows, as lists.

    The label fills a parameter of its usual names that no column has.
    """

    def __init__(
        self,
        parameters: Mapping[str, inspect.Parameter],
        required: Sequence[str],
        takes_messages: bool,
        label_name: str,
    ) -> None:
        self._required = [name for name in required if name not in _TRL_NAMES]
        takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        self._names = None if takes_any else frozenset(parameters)
        # Options of the function's own, such as target=200, are no labels.
        self._options = {
            name for name, each in parameters.items() if each.default not in (each.empty, None, "", [], ())
        }
        self._takes_messages = takes_messages
        self._label_names = (label_name,) if label_name else LABEL_NAMES

    async def score(self, call: Call, samples: Sequence[Sample]) -> list[Score]:
        """Samples with the same columns share a call: a row of a mixture never depends on its neighbours."""
        places: defaultdict[frozenset[str], list[int]] = defaultdict(list)
        for place, sample in enumerate(samples):
            places[frozenset(sample.columns)].append(place)
        scores: dict[int, Score] = {}
        for alike in places.values():
            scores.update(zip(alike, await self._score(call, [samples[place] for place in alike]), strict=True))
        return [scores[place] for place in range(len(samples))]

    async def _score(self, call: Call, samples: Sequence[Sample]) -> list[Score]:
        metrics: dict[str, float] = {}
        given = {**_trl_texts(samples, self._takes_messages), **self._columns(samples),
                 "log_extra": lambda name, values: None,
                 "log_metric": lambda name, value: metrics.update({str(name): float(value)})}  # fmt: skip
        returned = await call(**{k: v for k, v in given.items() if self._names is None or k in self._names})
        values = _flat(returned)
        rewards = check_numbers([0.0 if value is None else value for value in values], len(samples), "rewards")
        return [
            # The curve is a mean over the samples that have the log: with 0 for the others it is their share.
            Score(reward, logs={**metrics, "not_applicable": float(value is None)})
            for reward, value in zip(rewards, values, strict=True)
        ]

    def _columns(self, samples: Sequence[Sample]) -> dict[str, list[Any]]:
        names = set(samples[0].columns) - {*_TRL_NAMES, "prompt", "completion"}
        missing = [name for name in self._required if name not in names]
        labels = missing or [
            name
            for name in self._label_names
            if name not in self._options and (self._names is None or name in self._names)
        ]
        if missing and (len(missing) > 1 or missing[0] not in self._label_names):
            raise ValueError(
                f"the data rows have no columns {missing}; they have {sorted(names)} and the label, which is given as "
                f"{', '.join(self._label_names)}. Add the columns, or start with --label NAME if one is the label"
            )
        return {
            **{name: [sample.label for sample in samples] for name in labels},
            **{name: [sample.columns[name] for sample in samples] for name in names},
        }


def _trl_texts(samples: Sequence[Sample], as_messages: bool) -> dict[str, list[Any]]:
    def message(role: str, text: str) -> Any:
        return [{"role": role, "content": text}] if as_messages else text

    return {
        "prompts": [message("user", sample.prompt) for sample in samples],
        "completions": [message("assistant", sample.text) for sample in samples],
    }


def _verl_score(returned: Any) -> Score:
    """Return the score in a number, a dict with `score`, or a Score. Other numbers of a dict become logs."""
    if isinstance(returned, Score):
        return returned
    if isinstance(returned, tuple) and returned:
        returned = returned[0]  # as in verl, whose own scorers return further facts behind the reward
    if isinstance(returned, Mapping):
        reward = check_numbers(_flat(returned.get("score")), 1, "score")[0]
        others = {key: _item(value) for key, value in returned.items() if key != "score"}
        return Score(reward, logs={key: float(value) for key, value in others.items() if _is_loggable(value)})
    return Score(check_numbers(_flat(returned), 1, "the returned value")[0])


def _flat(values: Any) -> list[Any]:
    """Return a tensor, array, list or number as a flat list, without importing torch."""
    values = values.tolist() if hasattr(values, "tolist") else values
    items = list(values) if isinstance(values, list | tuple) else [values]
    return [_item(item) for item in items]


def _item(value: Any) -> Any:
    """Return a one-element tensor or list as its element, so that [N, 1] counts as [N]; a bool as 1 or 0."""
    if hasattr(value, "item"):
        with suppress(ValueError, RuntimeError):  # an array or tensor of several numbers
            value = value.item()
    elif isinstance(value, list) and len(value) == 1:
        value = value[0]
    return float(value) if isinstance(value, bool) else value


def _is_loggable(value: Any) -> bool:
    """Return whether a value can be logged; other values are skipped."""
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:
        return False
