"""Whole checkpoints of one run under a URL that fsspec knows: copied and read back, listed, fetched, removed.

Layout under URL/RUN/:

    step_000100-0123456789abcdef/...            the checkpoint's files; behind the dash: of its manifest's SHA-256
    step_000100-.../run_folder/...              the run folder's own lines as they were then
    step_000100-.../MANIFEST.json               put last: without it, or with another than the name tells, it is no copy
    step_000100-.../SET_ASIDE.json              the manifest of one that a run went back behind: it is no copy either

The only door to fsspec, which is imported when a store is opened.
"""

import hashlib
import json
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from learner.checkpoint.manifest import MANIFEST, Checkpoint, CorruptCheckpointError, read_checkpoint
from learner.checkpoint.sealed_files import files_under
from protocol.errors import SettingsError

_SET_ASIDE = "SET_ASIDE.json"
_RECORDS = "run_folder"
_READ_BYTES = 1 << 20
_NUM_DIGITS = 16
_WITHOUT_FOLDERS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "adl", "oss", "oci", "tos")


class StoreError(Exception):
    """The store did not do what was asked: it cannot be reached, refuses, or holds other bytes than it was given."""


@dataclass(frozen=True)
class Copy:
    """A whole checkpoint in the store."""

    name: str  # of its folder in the store
    step: int  # the last step in it
    model_digest: str  # of the model's shape and tokenizer


def copy_name(step: int, manifest: bytes) -> str:
    """Return the name of a checkpoint's folder in the store. manifest: its content."""
    return f"step_{step:06d}-{hashlib.sha256(manifest).hexdigest()[:_NUM_DIGITS]}"


def open_store(url: str, run_id: str) -> "CopyStore":
    """Return the store of a run's copies; nothing is asked of it yet.

    Raises: SettingsError for a kind of URL that fsspec does not know, or whose package is not installed.
    """
    import fsspec

    setting = f"settings: learner.copy_checkpoints_to = {url}"
    protocol = url.partition("://")[0]
    try:
        fsspec.get_filesystem_class(protocol)
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
    """All methods block for as long as the store takes, and raise StoreError; `moved` is called as bytes move."""

    def __init__(self, url: str, run_id: str, moved: Callable[[], None] = lambda: None) -> None:
        self.url = url
        self.moved = moved
        self._run_id = run_id
        self._opened: tuple[Any, str] | None = None

    def whole_copies(self) -> list[Copy]:
        """Return the whole copies, by step."""
        with _naming_errors():
            return sorted(filter(None, map(self._whole, self._names())), key=lambda copy: copy.step)

    def check_writable(self) -> None:
        """Write a small file and remove it again."""
        with _naming_errors():
            fs, root = self._open()
            mark = f"{root}/.{secrets.token_hex(8)}"
            self._make_folder(root)
            fs.pipe_file(mark, b"sluice")
            fs.rm_file(mark)

    def put(self, folder: Path, step: int, records: Mapping[str, Path]) -> Copy:
        """Copy a checkpoint's folder and read it back; it is listed once every byte is there and right. Of one that
        failed nothing is left, where the store lets it be removed.

        records: files of the run folder to keep with it, by name.
        """
        manifest = (folder / MANIFEST).read_bytes()
        name = copy_name(step, manifest)
        files = {file: path for file, path in files_under(folder).items() if file != MANIFEST}
        with _naming_errors():
            self._remove(name)
            try:
                return self._put(name, manifest, files, records)
            except Exception:  # on a disk that is full its part would keep the run itself from writing
                with suppress(Exception):
                    self._remove(name)
                raise

    def _put(self, name: str, manifest: bytes, files: Mapping[str, Path], records: Mapping[str, Path]) -> Copy:
        fs, root = self._open()
        target, listed = f"{root}/{name}", json.loads(manifest)["files"]
        for file, path in {**files, **{f"{_RECORDS}/{file}": path for file, path in records.items()}}.items():
            self._make_folder(f"{target}/{file}".rpartition("/")[0])
            fs.put_file(str(path), f"{target}/{file}", callback=self._callback())
            self.moved()
        for file in files.keys() & listed.keys():
            if (found := self._hash(fs, f"{target}/{file}")) != listed[file]["sha256"]:
                raise StoreError(f"{target}/{file} was read back with SHA-256 {found}")
        fs.pipe_file(f"{target}/{MANIFEST}", manifest)
        if (copy := self._whole(name)) is None:
            raise StoreError(f"{target}/{MANIFEST} is not what was written")
        return copy

    def fetch(self, copy: Copy, folder: Path) -> dict[str, bytes]:
        """Bring a copy's files into a new folder, unverified; returns the run folder's files that lie with it."""
        with _naming_errors():
            fs, root = self._open()
            source = f"{root}/{copy.name}/"
            records = {}
            for path in fs.find(source):
                file = path[path.index(copy.name) + len(copy.name) + 1 :]
                if ".." in Path(file).parts:
                    raise StoreError(f"{path} leads out of the folder")
                if file.startswith(f"{_RECORDS}/"):
                    records[file.removeprefix(f"{_RECORDS}/")] = fs.cat_file(path)
                    continue
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                fs.get_file(path, str(folder / file), callback=self._callback())
                self.moved()
        return records

    def record(self, copy: Copy, name: str) -> bytes:
        """Return a file of the run folder as it lies with a copy; empty where there is none."""
        with _naming_errors():
            fs, root = self._open()
            try:
                content: bytes = fs.cat_file(f"{root}/{copy.name}/{_RECORDS}/{name}")
            except FileNotFoundError:
                return b""
            return content

    def set_aside(self, copy: Copy) -> None:
        """Keep a copy from being listed; its files stay."""
        with _naming_errors():
            fs, root = self._open()
            manifest = fs.cat_file(f"{root}/{copy.name}/{MANIFEST}")
            fs.pipe_file(f"{root}/{copy.name}/{_SET_ASIDE}", manifest)
            fs.rm_file(f"{root}/{copy.name}/{MANIFEST}")

    def remove(self, copy: Copy) -> None:
        with _naming_errors():
            self._remove(copy.name)

    def remove_unfinished(self) -> None:
        """Remove what copies that never came to their end have left."""
        with _naming_errors():
            for name in self._names():
                if self._whole(name) is None and not self._is_set_aside(name):
                    self._remove(name)

    def _open(self) -> tuple[Any, str]:
        """Return fsspec's file system and the run's folder in it."""
        if self._opened is None:
            import fsspec

            fs, root = fsspec.core.url_to_fs(self.url)
            self._opened = (fs, f"{root.rstrip('/')}/{self._run_id}")
        return self._opened

    def _make_folder(self, path: str) -> None:
        """Make a folder, where the store has such: of one without, a mistyped bucket would be made here."""
        if self.url.partition("://")[0] not in _WITHOUT_FOLDERS:
            self._open()[0].makedirs(path, exist_ok=True)

    def _names(self) -> list[str]:
        fs, root = self._open()
        fs.invalidate_cache()
        try:
            names = [path.rstrip("/").rpartition("/")[2] for path in fs.ls(root, detail=False)]
        except FileNotFoundError:
            return []
        return [name for name in names if name.startswith("step_")]

    def _whole(self, name: str) -> Copy | None:
        """Return what a folder of the store holds; None when that is not whole."""
        fs, root = self._open()
        try:
            manifest = fs.cat_file(f"{root}/{name}/{MANIFEST}")
            facts: Checkpoint = read_checkpoint(Path(name), manifest)
        except (FileNotFoundError, CorruptCheckpointError):
            return None
        # With both, a death came while it was set aside.
        if name != copy_name(facts.step, manifest) or self._is_set_aside(name):
            return None
        return Copy(name, facts.step, facts.model_digest)

    def _is_set_aside(self, name: str) -> bool:
        fs, root = self._open()
        return bool(fs.exists(f"{root}/{name}/{_SET_ASIDE}"))

    def _remove(self, name: str) -> None:
        """Remove a folder, its manifest first: no half of it is ever listed."""
        fs, root = self._open()
        fs.invalidate_cache()
        for path in (f"{root}/{name}/{MANIFEST}", f"{root}/{name}"):
            if fs.exists(path):
                fs.rm(path, recursive=True)

    def _hash(self, fs: Any, path: str) -> str:
        digest = hashlib.sha256()
        with fs.open(path, "rb", cache_type="readahead") as file:
            while part := file.read(_READ_BYTES):
                digest.update(part)
                self.moved()
        return digest.hexdigest()

    def _callback(self) -> Any:
        from fsspec.callbacks import Callback

        return Callback(hooks={"moved": lambda *_, **__: self.moved()})


@contextmanager
def _naming_errors() -> Iterator[None]:
    """Turn whatever a store's package raises into a StoreError: each has errors of its own."""
    try:
        yield
    except StoreError:
        raise
    except Exception as error:  # a boundary: the reason is what matters
        reason = " ".join(str(error).split())[:300]
        raise StoreError(f"{type(error).__name__}: {reason}" if reason else type(error).__name__) from error
