"""A user's own advantage, loss or correction, from FILE.py:name or module:name."""

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, is_grad_enabled

from protocol.errors import SettingsError


@cache
def load_own(setting: str, name: str, record: type[Any]) -> Any:
    """Return the function or `record` of that name. Runs a user's module once per process.

    Raises: SettingsError that names the missing part.
    """
    where, _, attribute = name.rpartition(":")
    problem = f"settings: {setting} = {name}: "
    path = Path(where).resolve()
    if where.endswith(".py") and not path.is_file():
        raise SettingsError(f"{problem}there is no file {path}. Give the path of a Python file.")
    try:
        module = _load_file(path) if where.endswith(".py") else importlib.import_module(where)
    except (Exception, SystemExit) as error:  # a user's code may raise anything, and end itself as scripts do
        raise SettingsError(f"{problem}{where} cannot be loaded: {type(error).__name__}: {error}") from error
    found = getattr(module, attribute, None)
    if not callable(found) and not isinstance(found, record):
        raise SettingsError(
            f"{problem}{where} has no function or {record.__name__} of the name {attribute}. See docs/do/algorithms.md."
        )
    return found


def check_result_shape(
    setting: str, name: str, function: Callable[..., Any], num_arguments: int, num_returned: int = 1
) -> Callable[..., Any]:
    """Return the function with a check: each result must have the shape of its first argument.

    Any other shape, such as a mean's, would be broadcast over all tokens or samples in silence. The function gets
    copies of its tensors, because the step uses them again: a change in place would reach other terms.
    num_arguments: number of arguments that it gets. num_returned: number of tensors that it returns, as a tuple when
    there are several. The returned function raises SettingsError with the shapes that it got.
    Raises: SettingsError for a function that cannot be called with so many arguments.
    """
    _check_signature(f"settings: {setting} = {name}", function, num_arguments)

    @wraps(function)
    def call_and_check(*arguments: Any) -> Any:
        if not arguments[0].numel():  # a rank without work, or a part of a step: many functions of no token raise
            return arguments[0] if num_returned == 1 else (arguments[0],) * num_returned
        first, *others = (each.clone() if isinstance(each, Tensor) else each for each in arguments)
        returned = function(first, *others)
        parts = returned if isinstance(returned, tuple) else (returned,)
        shapes = [list(part.shape) if isinstance(part, Tensor) else type(part).__name__ for part in parts]
        expected = [list(first.shape)] * num_returned
        if shapes != expected:
            raise SettingsError(
                f"settings: {setting} = {name} returned {_join_shapes(shapes)}, expected {_join_shapes(expected)}: "
                "the shape of its first argument. See docs/do/algorithms.md."
            )
        if first.requires_grad and is_grad_enabled() and not parts[0].requires_grad:
            raise SettingsError(
                f"settings: {setting} = {name} returned a value without a gradient, which trains nothing: it must "
                "depend on its first argument, without detach() or no_grad(), and be the first of what it returns. "
                "See docs/do/algorithms.md."
            )
        return returned

    return call_and_check


def _check_signature(problem: str, function: Callable[..., Any], num_arguments: int) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # compiled functions may have none
        return
    try:
        signature.bind(*range(num_arguments))
    except TypeError:
        raise SettingsError(
            f"{problem} takes {signature}, but is called with {num_arguments} arguments by position. "
            "See docs/do/algorithms.md."
        ) from None


def _join_shapes(shapes: list[Any]) -> str:
    return " and ".join(str(shape) for shape in shapes)


@cache  # one module for all functions of a file: they share its variables
def _load_file(path: Path) -> ModuleType:
    # A name of its own for each path: two users' files may both be called advantage.py.
    module_name = f"algorithm_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look their module up here
    if (folder := str(path.parent)) not in sys.path:
        sys.path.append(folder)  # files beside it can be imported
    spec.loader.exec_module(module)
    return module
