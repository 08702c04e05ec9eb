"""Files of the user's own code that settings name as FILE.py:name: read before anything starts, not run."""

import ast
import re
from pathlib import Path

from protocol.errors import SettingsError
from protocol.settings.did_you_mean import likeliest_value
from protocol.settings.paths import describe_shadowed, environment_file
from protocol.settings.rollout import BUNDLED_ENVIRONMENTS, ENVIRONMENT_FORMS
from protocol.settings.settings import Settings

_AGENT = "agent"  # the kind of environment that names FILE.py:function
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def check_user_code(settings: Settings) -> None:
    """Raise SettingsError for an unknown environment, and for FILE.py:name without that file or name.

    Servers and ranks import what it names.
    """
    learner, environment = settings.learner, settings.rollout.environment
    where, _, class_name = environment.rpartition(":")
    if (file := environment_file(environment)) is not None:
        kind, path = file
        if kind == _AGENT:
            _check_program(environment, path)
        else:
            _check_file(environment, path)
    elif environment not in BUNDLED_ENVIRONMENTS and not (where and class_name.isidentifier()):
        raise SettingsError(
            f"settings: rollout.environment = {environment}: expected one of {ENVIRONMENT_FORMS}."
            + likeliest_value(environment, f"expected one of {ENVIRONMENT_FORMS}")
        )
    else:
        _check("rollout.environment", environment, is_class=True)
    _check("learner.advantage", learner.advantage, is_class=False)
    _check("learner.loss", learner.loss, is_class=False)
    _check("learner.correction", learner.correction, is_class=False)


def class_gives_reward(environment: str) -> bool:
    """Return whether FILE.py:CLASS names a class with `gives_reward = True`."""
    where, _, name = environment.rpartition(":")
    if not where.endswith(".py") or not Path(where).is_file():
        return False
    classes = [each for each in ast.parse(Path(where).read_bytes(), where).body if isinstance(each, ast.ClassDef)]
    fields = [ast.unparse(line) for each in classes if each.name == name for line in each.body]
    return any(re.fullmatch(r"gives_reward(: \w+)? = True", field) for field in fields)


def _check_program(environment: str, where: str) -> None:
    path, _, function = where.rpartition(":")
    if not path.endswith(".py") or not function.isidentifier():
        raise SettingsError(f"settings: rollout.environment = {environment}: expected {_AGENT}:FILE.py:function.")
    _check("rollout.environment", where, is_class=False)


def _check_file(environment: str, path: str) -> None:
    if not Path(path).is_file():
        problem = f"there is no file {path}. Give the path of a file."
        raise SettingsError(f"settings: rollout.environment = {environment}: {problem}")


def _check(setting: str, name: str | None, *, is_class: bool) -> None:
    where, _, own = (name or "").rpartition(":")
    if not where.endswith(".py"):
        return
    problem = f"settings: {setting} = {name}: "
    try:
        module = ast.parse(Path(where).read_bytes(), where)
    except FileNotFoundError:
        raise SettingsError(f"{problem}there is no file {where}. Give the path of a Python file.") from None
    except OSError as error:
        raise SettingsError(
            f"{problem}{where} cannot be read: {error.strerror}. Give the path of a Python file."
        ) from None
    except (SyntaxError, ValueError) as error:
        raise SettingsError(f"{problem}{where} is not Python: {error}.") from None
    if (shadowed := describe_shadowed(Path(where), module)) is not None:
        raise SettingsError(f"{problem}{shadowed}")
    if not any(_may_name(statement, own, is_class=is_class) for statement in module.body):
        kinds = ast.ClassDef if is_class else _FUNCTIONS
        found = [statement.name for statement in module.body if isinstance(statement, kinds)]
        raise SettingsError(
            f"{problem}{where} has no {'class' if is_class else 'function'} {own}. It has {', '.join(found) or 'none'}."
        )


def _may_name(statement: ast.stmt, name: str, *, is_class: bool) -> bool:
    """Return whether a statement may define this name; the import decides the rest."""
    if isinstance(statement, ast.ClassDef):
        return is_class and statement.name == name
    if isinstance(statement, _FUNCTIONS):
        return not is_class and statement.name == name
    if isinstance(statement, ast.Import):
        return False
    return not isinstance(statement, ast.Expr) and name in ast.unparse(statement)
