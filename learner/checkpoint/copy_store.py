"""Complete checkpoints of one run under a URL that fsspec knows.

Layout under URL/RUN/:

    0003_step_000100-0123456789abcdef/...          the checkpoint's files: number, step, start of the manifest's SHA-256
    0003_step_000100-0123456789abcdef/run_folder/  the run folder's records at that time
    0003_step_000100-.../MANIFEST.json             written last: without it the folder is not a copy

A run that goes back to an earlier checkpoint copies it again, with the next number. Copies with a lower number and a
later step are then left out of the list: a run never resumes from a past that it left.
"""

import hashlib
import re
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from learner.checkpoint.manifest import MANIFEST, CorruptCheckpointError, read_checkpoint
from learner.checkpoint.sealed_files import files_under
from protocol.errors import SettingsError

_RECORDS = "run_folder"
_NAME = re.compile(r"(?:(\d{4,})_)?step_(\d{6,})-([0-9a-f]{16})")  # copies of version 0.1 have no number
_WITHOUT_FOLDERS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "adl", "oss", "oci", "tos")


class StoreError(Exception):
    """The store cannot be reached, refuses, or has another file than was written."""


@dataclass(frozen=True, order=True)
class Copy:
    """A complete checkpoint in the store. Later copies are larger."""

    number: int  # number of the copy, from 1; 0: of version 0.1
    step: int  # last step in it
    name: str  # name of its folder in the store
    digest: str  # start of its manifest's SHA-256
    model_digest: str  # digest of the model's shape and tokenizer


def open_store(url: str, run_id: str) -> "CopyStore":
    """Return the store of a run's copies, without a request to it.

    Raises: SettingsError for a kind of URL that fsspec does not know, or whose package is not installed.
    """
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
    return CopyStore(url, run_id)


class CopyStore:
    """Copies of one run. Methods block for as long as the store takes, and raise StoreError.

    This is the only use of fsspec, which is imported when the store is first used.
    """

    def __init__(self, url: str, run_id: str) -> None:
        self.url = url
        self._run_id = run_id
        self._opened: tuple[Any, str] | None = None

    def copies(self) -> list[Copy]:
        """Return the complete copies of the run's present and its past, by step."""
        with _store_errors():
            found = sorted(filter(None, map(self._read, self._names())))
        listed: list[Copy] = []
        for copy in reversed(found):
            if not listed or copy.step < listed[-1].step:
                listed.append(copy)
        return listed[::-1]

    def check_writable(self) -> None:
        """Write a small file and remove it."""
        with _store_errors():
            fs, root = self._open()
            mark = f"{root}/.{secrets.token_hex(8)}"
            self._make_folder(root)
            fs.pipe_file(mark, b"sluice")
            fs.rm_file(mark)

    def put(self, folder: Path, step: int, records: Mapping[str, Path], on_progress: Callable[[], None]) -> str:
        """Copy a checkpoint's folder and compare the files' sizes; returns the name of the copy.

        records: files of the run folder to store with it, by name. on_progress: called as bytes move.
        """
        from fsspec.callbacks import Callback

        files = {name: path for name, path in files_under(folder).items() if name != MANIFEST}
        files |= {f"{_RECORDS}/{name}": path for name, path in records.items()}
        manifest = (folder / MANIFEST).read_bytes()
        with _store_errors():
            fs, root = self._open()
            number = 1 + max((_numbers(name)[0] for name in self._names()), default=0)
            name = f"{number:04d}_step_{step:06d}-{manifest_digest(manifest)}"
            for file, path in files.items():
                target = f"{root}/{name}/{file}"
                self._make_folder(target.rpartition("/")[0])
                fs.put_file(str(path), target, callback=Callback(hooks={"progress": lambda *_, **__: on_progress()}))
                if not file.startswith(_RECORDS) and (size := fs.size(target)) != path.stat().st_size:
                    raise StoreError(f"{target} has {size} bytes, expected {path.stat().st_size}")
            self._make_folder(f"{root}/{name}")
            fs.pipe_file(f"{root}/{name}/{MANIFEST}", manifest)
        return name

    def fetch(self, copy: Copy, folder: Path) -> dict[str, bytes]:
        """Write a copy's files to a new folder, unverified; returns the run folder's files that are stored with it."""
        with _store_errors():
            fs, root = self._open()
            records = {}
            for path in fs.find(f"{root}/{copy.name}/"):
                file = path[path.index(copy.name) + len(copy.name) + 1 :]
                if ".." in Path(file).parts:
                    raise StoreError(f"{path} leads out of the folder")
                if file.startswith(f"{_RECORDS}/"):
                    records[file.removeprefix(f"{_RECORDS}/")] = fs.cat_file(path)
                    continue
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                fs.get_file(path, str(folder / file))
        return records

    def record(self, copy: Copy, name: str) -> bytes:
        """Return a file of the run folder that is stored with a copy; empty if there is none."""
        with _store_errors():
            fs, root = self._open()
            try:
                content: bytes = fs.cat_file(f"{root}/{copy.name}/{_RECORDS}/{name}")
            except FileNotFoundError:
                return b""
            return content

    def remove_all_but(self, kept: Collection[str]) -> None:
        """Remove the copies without these names, complete or not. Folders with other names stay."""
        with _store_errors():
            fs, root = self._open()
            for name in set(self._names()) - set(kept):
                # The manifest goes first: a copy is never listed in part.
                for path in (f"{root}/{name}/{MANIFEST}", f"{root}/{name}"):
                    if fs.exists(path):
                        fs.rm(path, recursive=True)

    def _open(self) -> tuple[Any, str]:
        """Return fsspec's file system and the run's folder in it."""
        if self._opened is None:
            import fsspec

            fs, root = fsspec.core.url_to_fs(self.url)
            self._opened = (fs, f"{root.rstrip('/')}/{self._run_id}")
        return self._opened

    def _make_folder(self, path: str) -> None:
        """Make a folder if the store has folders. An object store would create a bucket with a mistyped name."""
        if self.url.partition("://")[0] not in _WITHOUT_FOLDERS:
            self._open()[0].makedirs(path, exist_ok=True)

    def _names(self) -> list[str]:
        """Return the names of the copies' folders, complete or not."""
        fs, root = self._open()
        fs.invalidate_cache()
        try:
            names = [path.rstrip("/").rpartition("/")[2] for path in fs.ls(root, detail=False)]
        except FileNotFoundError:
            return []
        return [name for name in names if _NAME.fullmatch(name)]

    def _read(self, name: str) -> Copy | None:
        """Return the copy in a folder of the store; None when it is not complete."""
        fs, root = self._open()
        number, step = _numbers(name)
        try:
            manifest = fs.cat_file(f"{root}/{name}/{MANIFEST}")
            checkpoint = read_checkpoint(Path(name), manifest)
        except (FileNotFoundError, CorruptCheckpointError):
            return None
        is_named_so = checkpoint.step == step and name.endswith(digest := manifest_digest(manifest))
        return Copy(number, step, name, digest, checkpoint.model_digest) if is_named_so else None


def manifest_digest(manifest: bytes) -> str:
    """Return the part of a copy's name that identifies its manifest."""
    return hashlib.sha256(manifest).hexdigest()[:16]


def _numbers(name: str) -> tuple[int, int]:
    """Return (number, step) in the name of a copy."""
    match = _NAME.fullmatch(name)
    assert match is not None
    return int(match[1] or 0), int(match[2])


@contextmanager
def _store_errors() -> Iterator[None]:
    """Turn every error of a store's package into a StoreError: each package has its own errors."""
    try:
        yield
    except StoreError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise StoreError(f"{type(error).__name__}: {reason}" if reason else type(error).__name__) from error
