"""A user's reward function from a Python file, in one of three known shapes.

    reward_func(queries, prompts, labels, **kwargs)                             OpenRLHF: a whole batch
    compute_score(data_source, solution_str, ground_truth, extra_info=None)     verl: one sample, sync or async
    score(sample)                                                               ours: one Sample, sync or async

The parameters' names determine the shape, so any function name works with `FILE.py:NAME`. Sync functions run on
`Workers`, one at a time by default.
"""

import asyncio
import functools
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from protocol.contained_tasks import contain_tasks
from protocol.errors import OperatorError
from protocol.http.bodies import check_numbers
from rewards.sample import Sample, Score, Scorer, ScorerFailure
from rewards.workers import Workers

_NAMES = ("reward_func", "compute_score", "score")
_VERL_KEYWORDS = frozenset({"data_source", "solution_str", "ground_truth", "extra_info"})
_ANY_NUMBER = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

_Call = Callable[..., Any]


def load_scorer(reference: str, workers: Workers | None = None) -> Scorer:
    """Return the scorer of `FILE.py[:NAME]`. Without a name: reward_func, compute_score or score.

    workers: threads for a sync function; None: one thread.
    Raises: OperatorError if the file cannot be loaded, or the function is missing or has an unknown shape.
    """
    file, separator, name = reference.rpartition(":")
    if not separator or name.endswith(".py"):
        file, name = reference, ""
    function = _find(_load_module(Path(file)), file, name)
    parameters = inspect.signature(function).parameters
    call = _caller(function, workers or Workers())
    if "queries" in parameters:
        return functools.partial(_score_batch, call)
    if "solution_str" in parameters:
        return functools.partial(_score_each, call, functools.partial(_verl_arguments, _keywords_of(parameters)))
    if len([p for p in parameters.values() if p.default is p.empty and p.kind not in _ANY_NUMBER]) == 1:
        return functools.partial(_score_each, call, _own_arguments)
    raise OperatorError(
        f"rewards: {file}:{function.__name__}{inspect.signature(function)} has no known shape. Expected reward_func"
        "(queries, prompts, labels), compute_score(data_source, solution_str, ground_truth) or score(sample)."
    )


def _load_module(path: Path) -> Any:
    specification = importlib.util.spec_from_file_location("sluice_user_reward", path)
    if specification is None or specification.loader is None or not path.is_file():
        raise OperatorError(f"rewards: --function {path} is not a Python file. Expected FILE.py or FILE.py:NAME.")
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    # Like `python FILE.py`: files in its folder can be imported.
    sys.path.insert(0, str(path.resolve().parent))
    try:
        specification.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a script may exit when it is run
        raise OperatorError(f"rewards: --function {path} cannot be loaded: {type(error).__name__}: {error}") from error
    return module


def _find(module: Any, file: str, name: str) -> _Call:
    names = (name,) if name else _NAMES
    found = [getattr(module, candidate) for candidate in names if callable(getattr(module, candidate, None))]
    if len(found) != 1:
        have = "none" if not found else "several"
        raise OperatorError(
            f"rewards: {file} has {have} of: {', '.join(names)}. Name one function with --function {file}:NAME."
        )
    function: _Call = found[0]
    return function


def _caller(function: _Call, workers: Workers) -> _Call:
    """Return `function` if it is async, else an async function that runs it on a worker."""
    if inspect.iscoroutinefunction(function):
        return function

    async def run(*args: Any, **kwargs: Any) -> Any:
        returned = await workers.run(functools.partial(function, *args, **kwargs))
        # A sync function may return an awaitable.
        return await returned if inspect.isawaitable(returned) else returned

    return run


async def _score_batch(call: _Call, samples: Sequence[Sample]) -> list[Score]:
    contain_tasks()
    queries, prompts = [s.query for s in samples], [s.prompt for s in samples]
    try:
        returned = await call(queries, prompts, [s.label for s in samples])
        return _batch_scores(returned, len(samples))
    except BaseException as error:
        raise _failure(None, error) from error


async def _score_each(
    call: _Call, arguments_of: Callable[[Sample], tuple[list[Any], dict[str, Any]]], samples: Sequence[Sample]
) -> list[Score]:
    """Return the scores of all samples. All samples are tried before the first failure is raised."""

    async def score(index: int, sample: Sample) -> Score:
        contain_tasks()
        args, kwargs = arguments_of(sample)
        try:
            return _single_score(await call(*args, **kwargs))
        except BaseException as error:
            raise _failure(index, error) from error

    results = await asyncio.gather(*(score(i, s) for i, s in enumerate(samples)), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if isinstance(result, Score)]


def _failure(index: int | None, error: BaseException) -> BaseException:
    """Return a function's exception as ScorerFailure; the cancellation of the call unchanged.

    SystemExit counts as a failure: the policy's code may call exit().
    """
    task = asyncio.current_task()
    is_cancelled = isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0
    return error if is_cancelled else ScorerFailure(index, error)


def _keywords_of(parameters: Mapping[str, inspect.Parameter]) -> frozenset[str]:
    """Return the verl keywords that a function takes: some of verl's own scorers take two of them."""
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return _VERL_KEYWORDS if takes_any else _VERL_KEYWORDS & parameters.keys()


def _verl_arguments(keywords: frozenset[str], sample: Sample) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments that verl passes for a row.

    ground_truth: the label's ground_truth, or the label itself. data_source and extra_info come from the label if it
    has them, else from the row's columns.
    """
    part = sample.label if isinstance(sample.label, dict) and "ground_truth" in sample.label else {}
    row = {**sample.columns, **part}
    given = {
        "data_source": row.get("data_source") or "",
        "solution_str": sample.text,
        "ground_truth": part.get("ground_truth", sample.label),
        "extra_info": row.get("extra_info") or {},
    }
    return [], {name: value for name, value in given.items() if name in keywords}


def _own_arguments(sample: Sample) -> tuple[list[Any], dict[str, Any]]:
    return [sample], {}


def _single_score(returned: Any) -> Score:
    if isinstance(returned, Score):
        return returned
    if isinstance(returned, Mapping):
        reward = check_numbers(_plain(returned.get("score")), 1, "score")[0]
        return Score(reward, logs={k: float(v) for k, v in returned.items() if k != "score" and _is_loggable(v)})
    return Score(check_numbers(_plain(returned), 1, "the returned value")[0])


def _batch_scores(returned: Any, num_samples: int) -> list[Score]:
    parts = returned if isinstance(returned, Mapping) else {"rewards": returned}
    rewards = check_numbers(_plain(parts.get("rewards")), num_samples, "rewards")
    scores: Sequence[float | None] = [None] * num_samples
    if parts.get("scores") is not None:
        scores = check_numbers(_plain(parts["scores"]), num_samples, "scores")
    logs: list[dict[str, float]] = [{} for _ in range(num_samples)]
    for name, values in (parts.get("extra_logs") or {}).items():
        flat = _plain(values)
        spread = flat * num_samples if len(flat) == 1 else flat
        for log, value in zip(logs, check_numbers(spread, num_samples, f"extra_logs.{name}"), strict=True):
            log[str(name)] = value
    return [Score(*parts) for parts in zip(rewards, scores, logs, strict=True)]


def _plain(values: Any) -> list[Any]:
    """Return a tensor, array, list or number as a flat list, without importing torch."""
    values = values.tolist() if hasattr(values, "tolist") else values
    items = list(values) if isinstance(values, list | tuple) else [values]
    return [_item(item) for item in items]


def _item(value: Any) -> Any:
    """Return a one-element tensor or list as its element, so that [N, 1] counts as [N]; a bool as 1 or 0."""
    if hasattr(value, "item"):
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
