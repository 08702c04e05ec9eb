"""Modules of users, imported again for each run: a server outlives runs, and users edit their files between them.

Installed packages, Sluice's own packages and modules that the process had before its first run stay. So does a package
with compiled parts, which a process can import only once.
"""

import importlib
import sys
import sysconfig
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from protocol.one_line import ROOMS

_OWN = frozenset(ROOMS)
_INSTALLED_FOLDERS = {"site-packages", "dist-packages"}
_STANDARD_LIBRARY = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})
_first_modules: set[str] = set()
_folders: list[str] = []  # that `import_beside` added


def forget_user_modules() -> None:
    """Drop users' modules and their folders, so that the next import reads the next run's files.

    The first call drops no modules.
    """
    # The next run's folder may have another module of the same name.
    sys.path[:] = [folder for folder in sys.path if folder not in _folders]
    _folders.clear()
    if not _first_modules:
        _first_modules.update(sys.modules)
    for name in list(_user_modules()):
        module = sys.modules.pop(name)
        # A folder without __init__.py stays, and `from FOLDER import NAME` would find the old module there.
        folder, _, last = name.rpartition(".")
        if folder in sys.modules and vars(sys.modules[folder]).get(last) is module:
            delattr(sys.modules[folder], last)
    importlib.invalidate_caches()


def import_beside(file: Path) -> None:
    """Let users' code import the modules in this file's folder, after installed ones, until `forget_user_modules`."""
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
        _folders.append(folder)


def send_whole(folder: Path) -> None:
    """Make Ray send what users' modules in this folder define, not its name: Ray's own processes cannot import it.

    verl's search tool works in such processes, and answers with the failure of their import.
    """
    if "ray" in sys.modules:
        from ray import cloudpickle

        for module in [sys.modules[name] for name in _user_modules()]:
            if Path(str(module.__file__)).resolve().is_relative_to(folder):
                cloudpickle.register_pickle_by_value(module)


def _user_modules() -> Iterator[str]:
    files = {
        name: path
        for name, module in sys.modules.items()
        if name not in _first_modules and (path := getattr(module, "__file__", None))
    }
    compiled = {_package(name) for name, path in files.items() if path.endswith(tuple(EXTENSION_SUFFIXES))}
    for name, path in files.items():
        is_installed = not _INSTALLED_FOLDERS.isdisjoint(Path(path).parts) or path.startswith(_STANDARD_LIBRARY)
        if not is_installed and _package(name) not in compiled | _OWN:
            yield name


def _package(name: str) -> str:
    return name.partition(".")[0]
