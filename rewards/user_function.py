"""A user's reward function from `FILE.py[:NAME]` or `MODULE:NAME`, called as its own framework does (`calling`)."""

import ast
import asyncio
import contextlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from protocol.contained_tasks import contain_tasks
from protocol.errors import OperatorError
from protocol.http.bodies import BodyError
from protocol.one_line import place_of
from protocol.settings.paths import describe_shadowed
from rewards.calling import Call, Form, form_of
from rewards.sample import Sample, Score, ScorerFailure, make_sample

_NAMES = ("reward_func", "compute_score", "score")
# Questions whose right answers score 0 when a function of Search-R1 reads the response alone: it looks for the
# assistant's turn, or skips the first answer, which is an example in the prompt.
_KNOWN_PROMPT = (
    "<|im_start|>user\nAnswer in tags, such as <answer> Beijing </answer>. What is 1 + 1?<|im_end|>\n"
    "<|im_start|>assistant\nAssistant: "
)
_KNIGHTS = "(1) Ann is a knight\n(2) Bo is a knave"  # of Logic-RL
_KNOWN_ANSWERS: tuple[tuple[str, str, Any], ...] = (  # right, wrong, label
    ("2", "3", {"target": ["2"]}),
    ("1 + 1", "1 - 1", {"target": 2, "numbers": [1, 1]}),
    ("2", "3", "2"),
    ("2", "3", 2),
    (_KNIGHTS, "(1) Ann is a knave\n(2) Bo is a knight", {"solution_text_format": _KNIGHTS}),
)
# A file with one of these looks for the assistant's turn in prompt and response, as Logic-RL's do.
_TURN_BEGINS = ("<|im_start|>assistant", "<|start_header_id|>assistant", "Assistant:", "<\uff5cAssistant\uff5c>")


class UserFunction:
    """A loaded function; a Scorer by its method `score`."""

    def __init__(self, reference: str, reads: str = "auto") -> None:
        """reads: response, sequence (prompt and response, as in Search-R1) or auto, which tries a known right answer.

        Raises: OperatorError if the file cannot be loaded, or the function is missing or has an unknown form.
        """
        self._function = _find(reference)
        self.reads_sequence = reads == "sequence" or (reads == "auto" and _reads_sequence(self._function))
        self.may_read_sequence = reads == "auto" and not self.reads_sequence and _names_turn(self._function)
        self._form = _known_form(self._function, reference, self.reads_sequence)
        self.is_async = inspect.iscoroutinefunction(self._function)
        self.takes_batch = self._form.takes_batch
        self._logged: set[tuple[str, str]] = set()
        self._files = _files_of(self._function)
        self.digest = _digest(self._files)
        self._edits = _edits(self._files)

    async def score(self, samples: Sequence[Sample]) -> list[Score]:
        """Return the scores. All samples are tried before the first failure is raised. Raises: ScorerFailure."""
        if (edits := _edits(self._files)) != self._edits:
            self._edits = edits
            print("rewards: the function's code was edited: a new run needs a new service", file=sys.stderr, flush=True)
        if self.takes_batch:
            return await self._attempt(samples, None)
        calls = (self._attempt([sample], index) for index, sample in enumerate(samples))
        results = await asyncio.gather(*calls, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [result[0] for result in results if isinstance(result, list)]

    async def _attempt(self, samples: Sequence[Sample], index: int | None) -> list[Score]:
        contain_tasks()
        try:
            return await self._form.score(_as_async(self._function), samples)
        except BaseException as error:  # also SystemExit: the policy's code may call exit()
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            raise self._failure(index, error) from error

    def _failure(self, index: int | None, error: BaseException) -> ScorerFailure:
        kind, place = type(error).__name__, place_of(error)
        if isinstance(error, BodyError) and (code := getattr(inspect.unwrap(self._function), "__code__", None)):
            place = f"{code.co_filename}:{code.co_firstlineno}"  # what it returned is wrong
        if (kind, place) not in self._logged:  # once: the function may fail on every sample
            self._logged.add((kind, place))
            traceback.print_exception(error)
        return ScorerFailure(index, kind, str(error), place)


def _files_of(function: Callable[..., Any]) -> list[Path]:
    """Return the function's file, and the loaded modules in its folder."""
    file = getattr(sys.modules.get(function.__module__), "__file__", None)
    if file is None:
        return []
    loaded = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    return sorted({Path(each) for each in loaded if each and Path(each).parent == Path(file).parent})


def _digest(files: Sequence[Path]) -> str:
    return sha256(b"".join(file.read_bytes() for file in files if file.is_file())).hexdigest()


def _edits(files: Sequence[Path]) -> list[int]:
    """Return when each file was edited; 0: it is gone."""
    return [file.stat().st_mtime_ns if file.is_file() else 0 for file in files]


def _as_async(function: Callable[..., Any]) -> Call:
    async def run(*args: Any, **kwargs: Any) -> Any:
        returned = function(*args, **kwargs)
        # A sync function may return an awaitable.
        return await returned if inspect.isawaitable(returned) else returned

    return run


def _find(reference: str) -> Callable[..., Any]:
    source, separator, name = reference.rpartition(":")
    if not separator or name.endswith(".py"):
        source, name = reference, ""
    module = _load_file(Path(source)) if source.endswith(".py") or os.sep in source else _load_module(source)
    names = (name,) if name else _NAMES
    found = [getattr(module, candidate) for candidate in names if callable(getattr(module, candidate, None))]
    if len(found) != 1:
        have = "none" if not found else "several"
        raise OperatorError(
            f"rewards: {source} has {have} of: {', '.join(names)}. Name one function with --function {source}:NAME."
        )
    function: Callable[..., Any] = found[0]
    return function


def _load_file(path: Path) -> Any:
    specification = importlib.util.spec_from_file_location("sluice_user_reward", path)
    if specification is None or specification.loader is None or not path.is_file():
        raise OperatorError(
            f"rewards: --function {path} is not a Python file. Expected FILE.py, FILE.py:NAME or MODULE:NAME."
        )
    with contextlib.suppress(SyntaxError, ValueError):  # the import says what is wrong
        if (shadowed := describe_shadowed(path, ast.parse(path.read_bytes()))) is not None:
            raise OperatorError(f"rewards: --function {shadowed}")
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    # Like `python FILE.py`: files in its folder can be imported. A file may have the name of a package that it imports,
    # such as verl's math_verify.py; then packages come first.
    is_like_a_package = importlib.util.find_spec(path.stem) is not None if path.stem.isidentifier() else False
    sys.path.insert(len(sys.path) if is_like_a_package else 0, str(path.resolve().parent))
    sys.path.append(os.getcwd())
    _load(lambda: specification.loader.exec_module(module), str(path))  # type: ignore[union-attr]
    return module


def _load_module(name: str) -> Any:
    sys.path.append(os.getcwd())
    return _load(lambda: importlib.import_module(name), name)


def _load(load: Callable[[], Any], what: str) -> Any:
    try:
        return load()
    except (Exception, SystemExit) as error:  # a script may exit when it is run
        advice = ""
        if isinstance(error, ImportError) and "relative import" in str(error):
            advice = ". It belongs to a package: install it, and give --function MODULE:NAME"
        raise OperatorError(
            f"rewards: --function {what} cannot be loaded: {type(error).__name__}: {error}{advice}"
        ) from error


def _known_form(function: Callable[..., Any], reference: str, reads_sequence: bool) -> Form:
    token_ids = inspect.signature(function).parameters.get("completion_ids")
    if token_ids is not None and token_ids.default is token_ids.empty:
        raise OperatorError(
            f"rewards: {reference} reads completion_ids, which a reward service does not receive. Count characters of "
            "completions, or set rewards.overlong_buffer_tokens for a penalty by length."
        )
    form = form_of(function, reads_sequence, _reads_messages(function))
    if form is None:
        raise OperatorError(
            f"rewards: {reference}: {function.__name__}{inspect.signature(function)} has no known form. Expected "
            "reward_func(queries, prompts, labels), compute_score(data_source, solution_str, ground_truth), "
            "TRL's (completions, ..) or score(sample)."
        )
    return form


def _reads_sequence(function: Callable[..., Any]) -> bool:
    """Return whether a known right answer scores above 0 with its prompt only, as with Search-R1's functions.

    Functions with a data_source are verl's own, which pass the response alone.
    """
    if not _may_be_of_search_r1(function):
        return False
    for right, wrong, truth in _KNOWN_ANSWERS:
        with contextlib.suppress(Exception, SystemExit):  # labels of another form
            known = [_known_sample(answer, {"ground_truth": truth}) for answer in (right, wrong)]
            whole = [asyncio.run(_reward(function, sample, reads_sequence=True)) for sample in known]
            # Of a function of length, wrong answers are worth as much.
            if whole[0] > max(0, whole[1]) and asyncio.run(_reward(function, known[0])) <= 0:
                return True
    return False


def _reads_messages(function: Callable[..., Any]) -> bool | None:
    """Return True if a known right answer scores above 0 as a message only, as with functions that catch errors."""
    parameters = inspect.signature(function).parameters
    if "completions" not in parameters:
        return None
    sample = _known_sample("2", "2", dict.fromkeys(parameters, "2"))
    with contextlib.suppress(Exception, SystemExit):  # texts raise, or the columns are others
        if asyncio.run(_reward(function, sample, reads_messages=False)) <= 0:
            return asyncio.run(_reward(function, sample, reads_messages=True)) > 0 or None
    return None


def _known_sample(answer: str, label: Any, columns: Mapping[str, Any] | None = None) -> Sample:
    response = f"<think>one more</think>\n<answer> {answer} </answer>"
    return make_sample(_KNOWN_PROMPT + response, _KNOWN_PROMPT, label, columns)


def _may_be_of_search_r1(function: Callable[..., Any]) -> bool:
    parameters = inspect.signature(function).parameters
    return "solution_str" in parameters and "data_source" not in parameters


def _names_turn(function: Callable[..., Any]) -> bool:
    """Return whether the function's file names the beginning of an assistant's turn, and it may get the prompt too."""
    if not _may_be_of_search_r1(function):
        return False
    with contextlib.suppress(OSError, TypeError):  # no source
        source = inspect.getsource(sys.modules[function.__module__])
        return any(name in source for name in _TURN_BEGINS)
    return False


async def _reward(
    function: Callable[..., Any], sample: Sample, reads_sequence: bool = False, reads_messages: bool | None = None
) -> float:
    form = form_of(function, reads_sequence, reads_messages)
    assert form is not None
    return (await form.score(_as_async(function), [sample]))[0].reward
