"""An index on disk that is whole or not there: built aside, its manifest written last, then renamed into place.

`python -m retriever.build` makes one; `python -m retriever.serve` opens it and builds it where it is missing, damaged
or of another corpus. Several services may start on one folder at once.
"""

import contextlib
import errno
import os
import shutil
import tempfile
from pathlib import Path

from blake3 import blake3
from pydantic import BaseModel, ValidationError

from protocol.errors import OperatorError
from retriever.corpus import Corpus
from retriever.indexes import bm25
from retriever.indexes.bm25 import Bm25Index
from retriever.indexes.words import RULES

MANIFEST = "MANIFEST.json"
_MAX_RENAMES = 10


class Recipe(BaseModel, frozen=True):
    """Everything that decides what an index says; an index of another recipe is built again."""

    schema_version: int = 1  # of this manifest
    backend: str = "bm25"  # kind of index
    corpus_digest: str  # Corpus.digest of the documents in it
    words: str = RULES  # name of the rules by which text becomes words
    k1: float = bm25.K1  # BM25: how soon a word's repetitions stop counting
    b: float = bm25.B  # BM25: how much long documents are held against their length, 0 to 1
    title_weight: int = bm25.TITLE_WEIGHT  # how many times the words of a title count


class Manifest(BaseModel, frozen=True):
    """What an index is, and how damage to its files shows."""

    recipe: Recipe  # what the index was made of, and how
    num_documents: int  # of the corpus
    files: dict[str, str]  # name of each file of the index, but this one -> blake3 of its bytes


def open_or_build(folder: Path, corpus: Corpus) -> tuple[Bm25Index, bool]:
    """Return the corpus's index and whether it had to be built.

    Raises: OperatorError when the folder holds something else or cannot be written.
    """
    index = open_index(folder, corpus)
    if index is not None:
        return index, False
    return build_index(folder, corpus), True


def open_index(folder: Path, corpus: Corpus) -> Bm25Index | None:
    """Return the index in folder, or None when there is none, or a damaged one, or one of another corpus or recipe."""
    try:
        manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
        if manifest.recipe != Recipe(corpus_digest=corpus.digest):
            return None
        if any(_digest(folder / name) != digest for name, digest in manifest.files.items()):
            return None
        return Bm25Index.load(folder)
    except (OSError, ValidationError):
        return None


def build_index(folder: Path, corpus: Corpus) -> Bm25Index:
    """Return the corpus's index after writing it to folder, in place of an older index there."""
    _refuse_strange_folder(folder)
    index = Bm25Index.build(corpus)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            index.save(aside)
            _write_manifest(aside, corpus)
            _move_into_place(aside, folder)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        raise OperatorError(
            f"retriever: the index cannot be written to {folder} ({error.strerror}). Choose another --index-path."
        ) from None
    return index


def _write_manifest(folder: Path, corpus: Corpus) -> None:
    files = {path.name: _digest(path) for path in sorted(folder.iterdir())}
    manifest = Manifest(recipe=Recipe(corpus_digest=corpus.digest), num_documents=len(corpus), files=files)
    (folder / MANIFEST).write_text(manifest.model_dump_json(indent=1), encoding="utf-8")
    folder.chmod(0o755)


def _move_into_place(aside: Path, folder: Path) -> None:
    """Rename aside to folder; an older index there is renamed away first. Of several at once, the last one stays."""
    old = aside.with_name(f"{aside.name}.old")
    for _ in range(_MAX_RENAMES):
        try:
            os.rename(aside, folder)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        with contextlib.suppress(FileNotFoundError):
            os.rename(folder, old)
            shutil.rmtree(old, ignore_errors=True)
    raise OSError(errno.EBUSY, "other services keep writing it")


def _refuse_strange_folder(folder: Path) -> None:
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return  # none, or another service has just renamed its own away
    except NotADirectoryError:
        names = [folder.name]
    if names and MANIFEST not in names:
        raise OperatorError(
            f"retriever: {folder} holds something that is not an index of this service, and is left as it is. "
            "Choose another --index-path, or empty that one."
        )


def _digest(path: Path) -> str:
    return blake3().update_mmap(path).hexdigest()
