"""Types of settings that hold a path. The loader makes paths absolute: a run's processes have other working folders.

A path becomes absolute when the settings are validated with the context {"folder": Path}: `~` is the user's home, and
a relative path starts in that folder. Without the context a path stays as it is.
"""

import ast
import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, ValidationInfo

# Prefix of a name on the Hugging Face hub, where a path is expected.
HUB_PREFIX = "hf:"
# Environments in a user's file: prefix of the path -> the file's form, such as openrlhf_agent:FILE.py
FILE_ENVIRONMENTS = {"agent": "FILE.py:function", "openrlhf_agent": "FILE.py", "verl_tools": "FILE.yaml"}
_CODE_SUFFIX = ".py"
_CONFIGURATIONS = (".yaml", ".yml", ".toml", ".jinja", ".j2")
_MAX_BYTES = 64 << 20  # of a data file that a start reads to see whether it changed


def absolute_path(path: str, info: ValidationInfo) -> str:
    """Return the absolute path, without following links. An empty path stays empty.

    Raises: ValueError for a URL, a variable, and when `~` names a user that does not exist.
    """
    if (variable := re.search(r"\$\{?\w+\}?", path)) is not None:
        raise ValueError(
            f"holds the variable {variable[0]}, which only a shell replaces, outside single quotes. Write the path"
        )
    if "://" in path:
        raise ValueError("expected a path of this machine, not a URL; only learner.copy_checkpoints_to takes one")
    folder = (info.context or {}).get("folder")
    if not path or folder is None:
        return path
    try:
        return str(Path(folder).resolve() / Path(path).expanduser())
    except RuntimeError:
        raise ValueError(f"{path} begins with the home of a user that this machine does not have") from None


def find_trained(given: str) -> tuple[str, Path | None]:
    """Return the model that a command's argument names, and the folder of the run that trained it; None for others.

    given: the folder of a run, which stands for its newest checkpoint, a checkpoint, its model/, or any other model.
    """
    for inside in ("checkpoints/latest/model", "latest/model", "model", "."):
        model = Path(os.path.abspath(Path(given).expanduser() / inside))  # RUN/checkpoints/step_000100/model
        checkpoints = model.parent.parent
        if model.is_dir() and model.name == "model" and checkpoints.name == "checkpoints":
            return str(model), checkpoints.parent
    return given, None


def environment_file(name: str) -> tuple[str, str] | None:
    """Return the kind and the path in rollout.environment; None when it is not a user's file.

    Example: "openrlhf_agent:my/agent.py" -> ("openrlhf_agent", "my/agent.py")
    """
    kind, colon, path = name.partition(":")
    return (kind, path) if colon and kind in FILE_ENVIRONMENTS else None


def user_files(environment: str, *functions: str | None) -> list[Path]:
    """Return the user's files in rollout.environment and functions such as FILE.py:name, and the modules they import.

    Installed modules do not count, but for that of MODULE:Class. Configurations beside a file that it names, such as
    an interactions.yaml, count, and modules of their classes.
    """
    kind, path = environment_file(environment) or ("", environment)
    names = [path.rpartition(":")[0] if ":" in FILE_ENVIRONMENTS.get(kind, ":") else path]
    names += [(name or "").rpartition(":")[0] for name in functions]
    files = [Path(name) for name in names if name and Path(name).is_file()]
    files += [] if kind or files or not names[0] else _files_of(names[0], [Path(folder) for folder in sys.path])
    own = [Path(folder) for folder in sys.path if "-packages" not in folder and not folder.startswith(sys.base_prefix)]
    for file in files:  # grows in the loop: modules import modules
        with contextlib.suppress(SyntaxError, ValueError):  # its import names the place
            for folder, name in _imports_of(file):
                found = _files_of(name, [folder] if folder != file.parent else [folder, *own])
                files += [module for module in found if module not in files]
            files += [beside for beside in _named_by(file) if _is_code(beside) and beside not in files]
    return files


def data_files(code: Iterable[Path]) -> list[Path]:
    """Return the data files beside the user's code that it names, such as levels.json: it may read or write them."""
    found: list[Path] = []
    for file in code:
        with contextlib.suppress(SyntaxError, ValueError):
            found += [beside for beside in _named_by(file) if not _is_code(beside) and beside not in found]
    return [file for file in found if file.stat().st_size <= _MAX_BYTES]


def _is_code(file: Path) -> bool:
    return file.suffix in (_CODE_SUFFIX, *_CONFIGURATIONS)


def _named_by(file: Path) -> Iterator[Path]:
    """Yield the files in a module's folder whose names stand in its code."""
    if file.suffix != _CODE_SUFFIX:
        return
    for node in ast.walk(ast.parse(file.read_bytes())):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and re.fullmatch(r"[\w./-]+\.\w+", node.value)
        ):
            with contextlib.suppress(OSError):
                if (named := file.parent / node.value).is_file():
                    yield named


def _imports_of(file: Path) -> Iterator[tuple[Path, str]]:
    """Yield the folder and the name of each module that a file may import."""
    if file.suffix != _CODE_SUFFIX:  # verl's tools and interactions
        yield from ((file.parent, name) for name in re.findall(r"class_name:\W*([\w.]+)\.\w", file.read_text()))
        return
    for statement in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(statement, ast.Import):
            yield from ((file.parent, alias.name) for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            folder = file.parents[max(0, statement.level - 1)]
            for alias in statement.names:
                yield folder, f"{statement.module}.{alias.name}" if statement.module else alias.name


def _files_of(name: str, folders: Iterable[Path]) -> list[Path]:
    """Return the files of a module and its packages in the first folder that has it."""
    parts = name.split(".")
    for folder in folders if parts[0] not in _ROOMS else ():
        stems = [folder.joinpath(*parts[:number]) for number in range(1, len(parts) + 1)]
        found = [file for stem in stems for file in (stem / "__init__.py", stem.with_suffix(".py")) if file.is_file()]
        if found or (len(parts) > 1 and stems[0].is_dir()):
            return found
    return []


def _data_path(name: str, info: ValidationInfo) -> str:
    return name if name.startswith(HUB_PREFIX) else absolute_path(name, info)


def _model_path(name: str, info: ValidationInfo) -> str:
    """A name that is not a folder may be a name on the Hugging Face hub."""
    absolute = absolute_path(name, info)
    return absolute if name and Path(absolute).is_dir() else name


def _code_path(name: str, info: ValidationInfo) -> str:
    file, colon, attribute = name.rpartition(":")
    return f"{absolute_path(file, info)}:{attribute}" if colon and file.endswith(_CODE_SUFFIX) else name


def _environment_path(name: str, info: ValidationInfo) -> str:
    if (file := environment_file(name)) is not None:
        kind, path = file
        return f"{kind}:{absolute_path(path, info)}"
    return _code_path(name, info)


def _path_or(*words: str) -> Callable[[str, ValidationInfo], str]:
    return lambda path, info: path if path in words else absolute_path(path, info)


FilePath = Annotated[str, AfterValidator(absolute_path)]
DataPath = Annotated[str, AfterValidator(_data_path)]  # a file, pattern or folder, or hf:OWNER/NAME
ModelPath = Annotated[str, AfterValidator(_model_path)]  # a folder, or a name on the hub
CodeName = Annotated[str, AfterValidator(_code_path)]  # FILE.py:name holds a path, every other name none
EnvironmentName = Annotated[str, AfterValidator(_environment_path)]
ResumePath = Annotated[str, AfterValidator(_path_or("auto", "never"))]


_ROOMS = ("protocol", "rollout", "rewards", "retriever", "learner", "deploy")


def describe_shadowed(path: Path, module: ast.Module) -> str | None:
    """Return a sentence about a file that imports the user's rewards.py, for which Python takes Sluice's package.

    path: the file; module: its code. Files in its folder and in the current one count. None: no such import.
    """
    names = _imports(module)
    for room in _ROOMS:
        for folder in (path.parent, Path.cwd()):
            if room in names and (own := folder / f"{room}.py").is_file():
                return f"{path} imports {room}, which is Sluice's package and not {own}. Rename {own.name}."
    return None


def _imports(module: ast.Module) -> set[str]:
    """Return the names of the modules that a file imports."""
    names = set()
    for statement in ast.walk(module):
        if isinstance(statement, ast.Import):
            names |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom) and statement.level == 0 and statement.module:
            names.add(statement.module)
    return names
