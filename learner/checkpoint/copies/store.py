"""Complete checkpoints of one run under a URL that fsspec knows: copied and read back, listed, fetched, removed.

Layout under URL/RUN/:

    step_000100-0123456789abcdef/...          the checkpoint's files; the name ends with its manifest's SHA-256
    step_000100-0123456789abcdef/run_folder/  the run folder's records at that time
    step_000100-.../MANIFEST.json             written last: without it the folder is not a copy
    step_000120-0123456789abcdef-g1/          a copy of generation 1
    generation_1_from_000100                  empty mark: generation 1 starts from step 100

A run that goes back to an earlier step starts a generation. Copies of later steps from earlier generations stay, but
are not listed: a run never resumes from a past that it left.
"""

import hashlib
import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from learner.checkpoint.manifest import MANIFEST, Checkpoint, CorruptCheckpointError, read_checkpoint
from learner.checkpoint.sealed_files import files_under
from protocol.errors import SettingsError

_RECORDS = "run_folder"
_NAME = re.compile(r"step_(\d{6,})-([0-9a-f]{16})(?:-g(\d+))?")
_GENERATION = re.compile(r"generation_(\d+)_from_(\d+)")
_READ_BYTES = 1 << 20
_WITHOUT_FOLDERS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "adl", "oss", "oci", "tos")


class StoreError(Exception):
    """The store cannot be reached, refuses, or returns other bytes than were written."""


@dataclass(frozen=True)
class Copy:
    """A complete checkpoint in the store."""

    name: str  # name of its folder in the store
    step: int  # last step in it
    model_digest: str  # digest of the model's shape and tokenizer

    @property
    def digest(self) -> str:
        """Return the digest of the checkpoint's manifest."""
        return self.name.split("-")[1]


def open_store(url: str, run_id: str) -> "CopyStore":
    """Return the store of a run's copies, without a request to it.

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
    """Copies of one run. Methods block for as long as the store takes, and raise StoreError.

    This is the only use of fsspec, which is imported when a store is opened.
    """

    def __init__(self, url: str, run_id: str, on_progress: Callable[[], None] = lambda: None) -> None:
        """on_progress: called as bytes move."""
        self.url = url
        self.on_progress = on_progress
        self._run_id = run_id
        self._opened: tuple[Any, str] | None = None

    def copies(self) -> list[Copy]:
        """Return the complete copies of the run's present and its past, by step."""
        with _store_errors():
            names = self._names()
            starts = _generation_starts(names)
            listed = [name for name in names if (found := _NAME.fullmatch(name)) and not _is_left(found, starts)]
            return sorted(filter(None, map(self._read, listed)), key=lambda copy: copy.step)

    def check_writable(self) -> None:
        """Write a small file and remove it."""
        with _store_errors():
            fs, root = self._open()
            mark = f"{root}/.{secrets.token_hex(8)}"
            self._make_folder(root)
            fs.pipe_file(mark, b"sluice")
            fs.rm_file(mark)

    def go_back(self, step: int) -> None:
        """Start a generation from this step, if there are copies of later steps."""
        if not any(copy.step > step for copy in self.copies()):
            return
        with _store_errors():
            fs, root = self._open()
            generation = 1 + max(_generation_starts(self._names()), default=0)
            fs.pipe_file(f"{root}/generation_{generation}_from_{step:06d}", b"\n")

    def put(self, folder: Path, step: int, records: Mapping[str, Path]) -> Copy:
        """Copy a checkpoint's folder and read it back. A failed copy is removed, as far as the store allows.

        records: files of the run folder to store with it, by name.
        """
        manifest = (folder / MANIFEST).read_bytes()
        files = {file: path for file, path in files_under(folder).items() if file != MANIFEST}
        with _store_errors():
            generation = max(_generation_starts(self._names()), default=0)
            name = f"step_{step:06d}-{manifest_digest(manifest)}" + (f"-g{generation}" if generation else "")
            self._remove(name)
            try:
                return self._put(name, manifest, files, records)
            except Exception:  # its part could fill the disk that the run itself writes to
                with suppress(Exception):
                    self._remove(name)
                raise

    def _put(self, name: str, manifest: bytes, files: Mapping[str, Path], records: Mapping[str, Path]) -> Copy:
        fs, root = self._open()
        target, listed = f"{root}/{name}", json.loads(manifest)["files"]
        for file, path in {**files, **{f"{_RECORDS}/{file}": path for file, path in records.items()}}.items():
            self._make_folder(f"{target}/{file}".rpartition("/")[0])
            fs.put_file(str(path), f"{target}/{file}", callback=self._callback())
            self.on_progress()
        for file in files.keys() & listed.keys():
            if (found := self._hash(fs, f"{target}/{file}")) != listed[file]["sha256"]:
                raise StoreError(f"{target}/{file} was read back with SHA-256 {found}")
        fs.pipe_file(f"{target}/{MANIFEST}", manifest)
        if (copy := self._read(name)) is None:
            raise StoreError(f"{target}/{MANIFEST} was read back with other content")
        return copy

    def fetch(self, copy: Copy, folder: Path) -> dict[str, bytes]:
        """Write a copy's files to a new folder, unverified; returns the run folder's files that are stored with it."""
        with _store_errors():
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
                self.on_progress()
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

    def remove(self, copy: Copy) -> None:
        with _store_errors():
            self._remove(copy.name)

    def remove_unfinished(self) -> None:
        """Remove the incomplete copies of the present generation."""
        with _store_errors():
            names = self._names()
            starts = _generation_starts(names)
            for name in names:
                found = _NAME.fullmatch(name)
                is_present = found is not None and int(found[3] or 0) == max(starts, default=0)
                if is_present and self._read(name) is None:
                    self._remove(name)

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
        fs, root = self._open()
        fs.invalidate_cache()
        try:
            return [path.rstrip("/").rpartition("/")[2] for path in fs.ls(root, detail=False)]
        except FileNotFoundError:
            return []

    def _read(self, name: str) -> Copy | None:
        """Return the copy in a folder of the store; None when it is not complete."""
        fs, root = self._open()
        try:
            manifest = fs.cat_file(f"{root}/{name}/{MANIFEST}")
            checkpoint: Checkpoint = read_checkpoint(Path(name), manifest)
        except (FileNotFoundError, CorruptCheckpointError):
            return None
        copy = Copy(name, checkpoint.step, checkpoint.model_digest)
        return copy if copy.digest == manifest_digest(manifest) and name.startswith(f"step_{copy.step:06d}-") else None

    def _remove(self, name: str) -> None:
        """Remove a folder, its manifest first: it is never listed in part."""
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
                self.on_progress()
        return digest.hexdigest()

    def _callback(self) -> Any:
        from fsspec.callbacks import Callback

        return Callback(hooks={"progress": lambda *_, **__: self.on_progress()})


def manifest_digest(manifest: bytes) -> str:
    """Return the part of a copy's name that identifies its manifest."""
    return hashlib.sha256(manifest).hexdigest()[:16]


def _generation_starts(names: list[str]) -> dict[int, int]:
    """Return each generation's first step, without that of generation 0."""
    return {int(found[1]): int(found[2]) for name in names if (found := _GENERATION.fullmatch(name))}


def _is_left(name: re.Match[str], starts: Mapping[int, int]) -> bool:
    """Return whether a later generation started from an earlier step than this copy's."""
    return any(number > int(name[3] or 0) and int(name[1]) > start for number, start in starts.items())


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
