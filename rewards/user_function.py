"""A user's reward function from `FILE.py[:NAME]` or `MODULE:NAME`, called as its own framework does (`calling`)."""

import ast
import contextlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

from protocol.contained_tasks import contain_tasks, is_own_cancellation
from protocol.errors import OperatorError
from protocol.http.bodies import BodyError
from protocol.one_line import place_of
from protocol.settings.paths import describe_shadowed, user_files
from protocol.waits import all_of
from rewards.calling import as_async, form_of
from rewards.known_answers import (
    compares_samples,
    names_turn,
    reads_calls,
    reads_messages,
    reads_opened_thought,
    reads_sequence,
)
from rewards.sample import Sample, Score, ScorerFailure

_NAMES = ("reward_func", "compute_score", "score")
# TRL's keywords that no request to a service has, and their remedies.
_TRL_ONLY = {
    "completion_ids": "Count words of completions, or set rewards.overlong_buffer_tokens for a penalty by length",
    "trainer_state": "Give the parameter a default",
    "environments": "Score with the environment itself: a class FILE.py:NAME as rollout.environment",
}


class UserFunction:
    """A loaded function; a Scorer by its method `score`."""

    def __init__(self, reference: str, reads: str = "auto", label_name: str = "") -> None:
        """reads, label_name: see `form_of`; auto: as known answers show.

        Raises: OperatorError if the file cannot be loaded, or the function is missing or has an unknown form.
        """
        module, self._function = _find(reference)
        self.files = _files_of(module)  # before a first call, which may import more in one process than in another
        name = getattr(self._function, "__name__", type(self._function).__name__)
        if form_of(self._function, reads) is None:
            raise OperatorError(
                f"rewards: {reference}: {name}{inspect.signature(self._function)} has no known form. Expected "
                "reward_func(queries, prompts, labels), compute_score(data_source, solution_str, ground_truth), "
                "TRL's (completions, ..) or score(sample)."
            )
        _check_trl(self._function, reference)
        _check_options(self._function, f"rewards: {reference}: {name}", reads, label_name)
        self.reads = _what_it_reads(self._function, reference) if reads == "auto" else reads
        is_asked = reads == "auto" and self.reads == "response"
        self.may_read_sequence = _why_sequence(self._function) if is_asked else ""
        self.reads_calls = reads_calls(self._function)
        self.reads_prompts = {"prompts", "completions"} <= set(inspect.signature(self._function).parameters)
        form = form_of(self._function, self.reads, label_name)
        assert form is not None
        self._form = form
        called = (self._function, getattr(self._function, "__call__", None))  # noqa: B004 (a method, not a question)
        self.is_async = any(inspect.iscoroutinefunction(each) for each in called)
        self.takes_batch = self._form.takes_batch
        self._logged: set[tuple[str, str]] = set()
        self.digest = digest_of(self.files)
        self.called = f"{name} {self.reads} {label_name}"
        self._edits = _edits(self.files)

    def compares_samples(self) -> bool:
        """Return whether known answers score otherwise in one call than alone."""
        return self.takes_batch and compares_samples(self._function, self.reads)

    async def score(self, samples: Sequence[Sample]) -> list[Score]:
        """Return the scores. All samples are tried before the first failure is raised. Raises: ScorerFailure."""
        if (edits := _edits(self.files)) != self._edits:
            self._edits = edits
            print("rewards: the function's code was edited: a new run needs a new service", file=sys.stderr, flush=True)
        if self.takes_batch:
            return await self._attempt(samples, None)
        return [score for (score,) in await all_of(self._attempt([each], index) for index, each in enumerate(samples))]

    async def _attempt(self, samples: Sequence[Sample], index: int | None) -> list[Score]:
        contain_tasks()
        try:
            return await self._form.score(as_async(self._function), samples)
        except BaseException as error:  # also SystemExit: the policy's code may call exit()
            if is_own_cancellation(error):
                raise
            raise self._failure(index, error) from error

    def _failure(self, index: int | None, error: BaseException) -> ScorerFailure:
        kind, place = type(error).__name__, place_of(error)
        if isinstance(error, BodyError) and (code := getattr(inspect.unwrap(self._function), "__code__", None)):
            place = f"{code.co_filename}:{code.co_firstlineno}"  # what it returned is wrong
        if (kind, place) not in self._logged:  # once: the function may fail on every sample
            self._logged.add((kind, place))
            traceback.print_exception(error)
        return ScorerFailure(index, kind, error, place)


def _check_options(function: Callable[..., Any], where: str, reads: str, label_name: str) -> None:
    """Raise OperatorError for an option that the function's form does not have."""
    parameters = inspect.signature(function).parameters
    is_trl, takes_all = "completions" in parameters, any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    if label_name and not (is_trl and (label_name in parameters or takes_all)):
        raise OperatorError(f"{where} has no parameter {label_name} of TRL's form. Correct --label, or leave it out.")
    option = {"text": "--completions", "messages": "--completions", "sequence": "--solution-str"}.get(reads)
    if option and is_trl != (option == "--completions"):
        raise OperatorError(
            f"{where} does not read {'completions' if not is_trl else 'solution_str'}. Leave {option} out."
        )


def _files_of(module: ModuleType) -> list[Path]:
    """Return the module's file, the loaded modules in its folder, and all files of the user that it may import."""
    if (file := module.__file__) is None:
        return []
    loaded = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    folder = Path(file).resolve().parent  # of imports too, where the file's path has a link
    beside = {path for each in loaded if each and (path := Path(each).resolve()).parent == folder}
    return sorted(beside | {path.resolve() for path in user_files("", f"{file}:")})


def digest_of(files: Iterable[Path]) -> str:
    return sha256(b"".join(file.read_bytes() for file in files if file.is_file())).hexdigest()


def _edits(files: Sequence[Path]) -> list[int]:
    """Return when each file was edited; 0: it is gone."""
    return [file.stat().st_mtime_ns if file.is_file() else 0 for file in files]


def _find(reference: str) -> tuple[ModuleType, Callable[..., Any]]:
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
    return module, found[0]


def _load_file(path: Path) -> Any:
    # A file may have the name of a package that it imports, such as verl's math_verify.py; then packages come first.
    found = importlib.util.find_spec(path.stem) if path.stem.isidentifier() else None
    is_like_a_package = found is not None and found.origin != str(path.resolve())
    # Processes that the function spawns import it by its name.
    name = path.stem if path.stem.isidentifier() and not is_like_a_package else "sluice_user_reward"
    specification = importlib.util.spec_from_file_location(name, path)
    if specification is None or specification.loader is None or not path.is_file():
        raise OperatorError(
            f"rewards: --function {path} is not a Python file. Expected FILE.py, FILE.py:NAME or MODULE:NAME."
        )
    with contextlib.suppress(SyntaxError, ValueError):  # the import says what is wrong
        if (shadowed := describe_shadowed(path, ast.parse(path.read_bytes()))) is not None:
            raise OperatorError(f"rewards: --function {shadowed}")
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    # Like `python FILE.py`: files in its folder can be imported.
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


def _check_trl(function: Callable[..., Any], reference: str) -> None:
    parameters = inspect.signature(function).parameters
    for name, remedy in _TRL_ONLY.items():
        if name in parameters and parameters[name].default is inspect.Parameter.empty:
            raise OperatorError(
                f"rewards: {reference} reads {name}, which a reward service does not receive. {remedy}."
            )


def _why_sequence(function: Callable[..., Any]) -> str:
    """Return why a verl function that gets the response may expect its prompt too; empty: nothing shows it."""
    if names_turn(function):
        return "its file names the beginning of an assistant's turn, which a response lacks"
    if reads_opened_thought(function):
        return "a right answer scored 0 without its <think>, which some templates put into the prompt"
    return ""


def _what_it_reads(function: Callable[..., Any], reference: str) -> str:
    if "completions" in inspect.signature(function).parameters:
        return "messages" if reads_messages(function, reference) else "text"
    return "sequence" if reads_sequence(function) else "response"
