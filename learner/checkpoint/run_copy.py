"""A copy of a run folder under a URL that fsspec knows: its records and its newest checkpoints, with the same names.

URL/RUN/checkpoints/step_000100/MANIFEST.json is written after all other files of the folder: without it a checkpoint is
not complete. URL/RUN/.owner names the process that writes.
"""

import secrets
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from learner.checkpoint.folder import name_of
from learner.checkpoint.manifest import MANIFEST
from learner.checkpoint.sealed_files import files_under
from learner.disk.run_folder import CHECKPOINTS, INSTALLATION, MODELS, RECORDS, SEARCH_INDEX, SETTINGS, SKIPPED_ROWS
from protocol.disk.files import replace_file
from protocol.errors import SettingsError

# Files of the run folder that a start on an empty machine continues.
_RECORDS = (*RECORDS, SKIPPED_ROWS, SETTINGS, SEARCH_INDEX, INSTALLATION, MODELS)
_STEP = "step_"
_WITHOUT_FOLDERS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "adl", "oss", "oci", "tos")


class StoreError(Exception):
    """The store cannot be reached, refuses, or has another file than was written."""


class RunCopy:
    """The copy of one run. Methods block for as long as the store takes, and raise StoreError.

    This is the only use of fsspec, which is imported when a copy is opened.
    """

    def __init__(self, url: str, run_id: str) -> None:
        """Raises: SettingsError for a kind of URL that fsspec does not know, or whose package is not installed."""
        import fsspec

        setting = f"settings: learner.copy_checkpoints_to = {url}"
        try:
            fsspec.get_filesystem_class(url.partition("://")[0])
        except ImportError as error:
            raise SettingsError(
                f"{setting} needs a package that is not installed ({error}). Install it here with uv pip install "
                f"--python .venv/bin/python NAME; s3fs and gcsfs have to be of version {fsspec.__version__}."
            ) from None
        except ValueError:
            raise SettingsError(
                f"{setting} is of a kind that fsspec does not know. Give a URL such as s3://BUCKET/FOLDER, "
                "gs://BUCKET/FOLDER or file:///FOLDER."
            ) from None
        self.url = f"{url.rstrip('/')}/{run_id}"
        self._owner = secrets.token_hex(8).encode()

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, in order."""
        with self._opened() as (fs, root):
            return [step for step in _folders(fs, root) if _read(fs, _manifest(root, step))]

    def claim(self) -> None:
        """Make this process the owner. Another owner stops to write."""
        with self._opened() as (fs, root):
            self._make_folder(fs, root)
            fs.pipe_file(f"{root}/.owner", self._owner)

    def is_own(self) -> bool:
        with self._opened() as (fs, root):
            return _read(fs, f"{root}/.owner") == self._owner

    def check_writable(self) -> None:
        """Write a small file and remove it."""
        with self._opened() as (fs, root):
            self._make_folder(fs, root)
            mark = f"{root}/.{secrets.token_hex(8)}"
            fs.pipe_file(mark, b"sluice")
            fs.rm_file(mark)

    def put(self, checkpoint: Path, step: int, folder: Path, on_progress: Callable[[], None]) -> None:
        """Copy a checkpoint and the records of the run folder, and compare the files' sizes.

        on_progress: called as bytes move.
        """
        from fsspec.callbacks import Callback

        def send(file: Path, target: str) -> None:
            self._make_folder(fs, target.rpartition("/")[0])
            fs.put_file(str(file), target, callback=Callback(hooks={"progress": lambda *_, **__: on_progress()}))

        manifest = (checkpoint / MANIFEST).read_bytes()
        with self._opened() as (fs, root):
            if _read(fs, _manifest(root, step)) == manifest:
                return
            _remove(fs, root, step)
            for name, file in files_under(checkpoint).items():
                if name == MANIFEST:
                    continue
                send(file, target := f"{_folder(root, step)}/{name}")
                if (size := fs.size(target)) != file.stat().st_size:
                    raise StoreError(f"{target} has {size} bytes, expected {file.stat().st_size}")
            for name in _RECORDS:
                if (folder / name).is_file():
                    send(folder / name, f"{root}/{name}")
            fs.pipe_file(_manifest(root, step), manifest)

    def fetch(self, step: int, target: Path, folder: Path) -> None:
        """Write a checkpoint to the new folder `target`, unverified, and the records to the run folder."""
        with self._opened() as (fs, root):
            source = f"{_folder(root, step)}/"
            for path in fs.find(source):
                name = path[path.index(source) + len(source) :]
                if ".." in Path(name).parts:
                    raise StoreError(f"{path} leads out of the folder")
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                fs.get_file(path, str(target / name))
            for name in _RECORDS:
                if content := _read(fs, f"{root}/{name}"):
                    replace_file(folder / name, content)

    def read_settings(self) -> bytes:
        """Return the settings of the run; empty when the copy has none."""
        with self._opened() as (fs, root):
            return _read(fs, f"{root}/{SETTINGS}")

    def remove_all_but(self, kept: Container[int]) -> None:
        """Remove the checkpoints of other steps, complete or not."""
        with self._opened() as (fs, root):
            for step in _folders(fs, root):
                if step not in kept:
                    _remove(fs, root, step)

    @contextmanager
    def _opened(self) -> Iterator[tuple[Any, str]]:
        """Yield fsspec's file system and the run's folder in it. Every error becomes a StoreError.

        Each package for a kind of store has errors of its own.
        """
        import fsspec

        try:
            fs, root = fsspec.core.url_to_fs(self.url)
            fs.invalidate_cache()
            yield fs, root
        except StoreError:
            raise
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            raise StoreError(f"{type(error).__name__}: {reason}" if reason else type(error).__name__) from error

    def _make_folder(self, fs: Any, path: str) -> None:
        """Make a folder if the store has folders. An object store would create a bucket with a mistyped name."""
        if self.url.partition("://")[0] not in _WITHOUT_FOLDERS:
            fs.makedirs(path, exist_ok=True)


def _folders(fs: Any, root: str) -> list[int]:
    """Return the steps of all checkpoints, complete or not, in order."""
    try:
        names = [path.rstrip("/").rpartition("/")[2] for path in fs.ls(f"{root}/{CHECKPOINTS}", detail=False)]
    except FileNotFoundError:
        return []
    numbers = [name.removeprefix(_STEP) for name in names if name.startswith(_STEP)]
    return sorted(int(number) for number in numbers if number.isdecimal())


def _read(fs: Any, path: str) -> bytes:
    """Return a file's content; empty when it is missing. `exists` would take a failure for a missing file."""
    try:
        content: bytes = fs.cat_file(path)
    except FileNotFoundError:
        return b""
    return content


def _remove(fs: Any, root: str, step: int) -> None:
    """Remove a checkpoint, its manifest first: a part of it is never listed."""
    for path in (_manifest(root, step), _folder(root, step)):
        with suppress(FileNotFoundError):
            fs.rm(path, recursive=True)


def _folder(root: str, step: int) -> str:
    return f"{root}/{CHECKPOINTS}/{name_of(step)}"


def _manifest(root: str, step: int) -> str:
    return f"{_folder(root, step)}/{MANIFEST}"
