"""An index on disk that is whole or not there: built aside, its manifest written last, then renamed into place.

The folder holds the corpus's documents too, so that a service reads what was indexed, whatever becomes of the JSONL
file. Several services may open or build one folder at once.
"""

import contextlib
import errno
import json
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from blake3 import blake3
from pydantic import BaseModel

from protocol.disk.lock import locked
from protocol.errors import OperatorError
from retriever.corpus import Corpus, digest_of, open_corpus, read_corpus
from retriever.indexes.by_name import IndexOptions, kind_named
from retriever.indexes.index import Index, IndexKind

MANIFEST = "MANIFEST.json"
_MAX_RENAMES = 10
# A builder makes its folder a moment before it locks it.
_LEFT_S = 10.0
# 2: the corpus lies beside its index.
_SCHEMA_VERSION = 2


class Manifest(BaseModel, frozen=True):
    """MANIFEST.json of an index."""

    recipe: dict[str, str | int | float]  # everything that decides what the index says
    num_documents: int  # of the corpus
    files: dict[str, str]  # blake3 of every file of the index


def recipe_of(name: str, kind: IndexKind, corpus_digest: str) -> dict[str, str | int | float]:
    """Return everything that decides what the index of this name and corpus says."""
    return {
        "schema_version": _SCHEMA_VERSION,
        "backend": name,
        "corpus_digest": corpus_digest,
        **kind.recipe(),
    }


def open_or_build(
    folder: Path, corpus_path: Path, name: str, options: IndexOptions | None = None
) -> tuple[Index, Corpus, bool]:
    """Return a corpus, its index and whether that had to be built.

    Raises: OperatorError when the corpus is wrong, or the folder holds something else or cannot be written.
    """
    kind = kind_named(name, options)
    found = open_index(folder, digest_of(corpus_path), name, kind)
    if found is not None:
        return *found, False
    return *build_index(folder, corpus_path, name, kind), True


def content_hash(folder: Path, reranker: str | None = None, rerank_depth: int = 0) -> str:
    """Return the digest of what the index in folder says: services with the same one answer alike.

    reranker: model that orders what is found, the first rerank_depth of it; None: none does.
    """
    beside: dict[str, str | int] = {} if reranker is None else {"reranker": reranker, "rerank_depth": rerank_depth}
    return _digest_of_recipe({**Manifest.model_validate_json((folder / MANIFEST).read_bytes()).recipe, **beside})


def open_index(
    folder: Path, corpus_digest: str, name: str, kind: IndexKind | None = None
) -> tuple[Index, Corpus] | None:
    """Return the index in folder and its corpus, or None when there is none, or a damaged or another one."""
    kind = kind or kind_named(name)
    try:
        manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
        if manifest.recipe != recipe_of(name, kind, corpus_digest):
            return None
        if any(_digest(folder / file) != digest for file, digest in manifest.files.items()):
            return None
        return kind.load(folder), open_corpus(folder, corpus_digest)
    except (OSError, ValueError):
        return None


def build_index(folder: Path, corpus_path: Path, name: str, kind: IndexKind | None = None) -> tuple[Index, Corpus]:
    """Return the corpus and its index after writing both to folder, in place of what was there."""
    kind = kind or kind_named(name)
    folder = folder.resolve()  # what a link leads to is replaced, not the link
    _refuse_strange_folder(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_left_overs(folder)
        aside = Path(tempfile.mkdtemp(prefix=_aside_prefix(folder), dir=folder.parent))
        with locked(aside):
            try:
                corpus = read_corpus(corpus_path, aside)
                recipe = recipe_of(name, kind, corpus.digest)
                scratch = _scratch(folder, recipe)
                index = kind.build(corpus, scratch)
                index.save(aside)
                _write_manifest(aside, recipe, len(corpus))
                _move_into_place(aside, folder)
                shutil.rmtree(scratch, ignore_errors=True)
            finally:
                shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        raise OperatorError(
            f"retriever: the index cannot be written to {folder} ({error.strerror}). Choose another --index-path."
        ) from None
    return index, corpus


def _aside_prefix(folder: Path) -> str:
    return f".{folder.name}.building-"


def _scratch(folder: Path, recipe: Mapping[str, str | int | float]) -> Path:
    """Return where a build that was broken off and the next one of the same recipe keep what they share."""
    return folder.with_name(f".{folder.name}.encoded-{_digest_of_recipe(recipe)[:16]}")


def _digest_of_recipe(recipe: Mapping[str, str | int | float]) -> str:
    return blake3(json.dumps(recipe, sort_keys=True).encode()).hexdigest()


def _remove_left_overs(folder: Path) -> None:
    """Remove what builders that were killed have left beside folder: one that lives holds a lock on its own."""
    for name in os.listdir(folder.parent):
        path = folder.parent / name
        if not name.startswith(_aside_prefix(folder)):
            continue
        with contextlib.suppress(OSError):  # another has just removed it, or locks it
            if time.time() - path.stat().st_ctime < _LEFT_S:
                continue
            if not path.is_dir():
                continue
            with locked(path):
                shutil.rmtree(path, ignore_errors=True)


def _write_manifest(folder: Path, recipe: dict[str, str | int | float], num_documents: int) -> None:
    files = {path.name: _digest(path) for path in sorted(folder.iterdir())}
    manifest = Manifest(recipe=recipe, num_documents=num_documents, files=files)
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
