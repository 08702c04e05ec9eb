"""Files that are complete or unchanged after a crash or a loss of power: written aside, fsynced, renamed."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from blake3 import blake3

from protocol.errors import OperatorError


def replace_file(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Give the file this content; it is on the disk when this returns. One writer at a time.

    mode: permissions of the new file, less the umask. Raises: OSError; the file is then unchanged.
    """
    with replacing(path, mode) as aside:
        aside.write_bytes(content)


@contextmanager
def replacing(path: Path, mode: int = 0o666, writer: str = "") -> Iterator[Path]:
    """Yield an empty file to write; it takes the name `path` when the block succeeds, and is removed when it fails.

    writer: distinguishes writers that may replace the same file at the same time.
    """
    aside = aside_of(path, writer)
    try:
        aside.unlink(missing_ok=True)
        os.close(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
        yield aside
        sync(aside)
        move_synced(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


def copy_synced(source: Path, target: Path) -> None:
    """Copy a file's content; it is on the disk when this returns. Raises: OSError."""
    shutil.copyfile(source, target)
    sync(target)


def move_synced(source: Path, target: Path) -> None:
    """Rename a file within its folder, over an existing target; the rename is on the disk when this returns.

    Raises: OSError.
    """
    source.replace(target)
    sync(target.parent)


def model_identity(model: str) -> str:
    """Return the digest of a model folder's files at its top, equal for copies; of a model on the hub its name."""
    folder, digest = Path(model), blake3()
    if not folder.is_dir():
        return model
    kinds = {".json", ".safetensors", ".bin", ".txt", ".model"}
    for file in sorted(each for each in folder.iterdir() if each.suffix in kinds):
        digest.update(file.name.encode()).update_mmap(file)
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Write a file's content, or a folder's list of names, to the disk. Raises: OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def aside_of(path: Path, writer: str = "") -> Path:
    """Return where a file's next content is written: a hidden name in the same folder. The next writer reuses it."""
    return path.with_name(f".{path.name}.{writer}" if writer else f".{path.name}")


@contextmanager
def naming_disk_errors(what: str, cure: str) -> Iterator[None]:
    """Raise OperatorError for an OSError of the block: "WHAT: reason. CURE"."""
    try:
        yield
    except OSError as error:
        raise OperatorError(f"{what}: {error.strerror or error}. {cure}") from None
