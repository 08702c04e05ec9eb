"""An index folder that is complete or absent: built in a temporary folder, manifest last, then renamed.

The folder also holds the documents, so later changes of the JSONL file do not matter. Several services may open and
build one folder; builders wait for each other.
"""

import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from blake3 import blake3
from pydantic import BaseModel

from protocol.disk.lock import file_lock
from protocol.errors import OperatorError
from retriever.corpus import Corpus, digest_of, open_corpus, read_corpus
from retriever.indexes.by_name import IndexOptions, kind_named
from retriever.indexes.index import Index, IndexKind

MANIFEST = "MANIFEST.json"
# 2: the index folder holds the corpus.
_SCHEMA_VERSION = 2


class Manifest(BaseModel, frozen=True):
    """MANIFEST.json of an index."""

    recipe: dict[str, str | int | float]  # everything that determines the index
    num_documents: int
    files: dict[str, str]  # file name -> blake3


def recipe_of(name: str, kind: IndexKind, corpus_digest: str) -> dict[str, str | int | float]:
    """Return everything that determines the index of this name and corpus."""
    return {
        "schema_version": _SCHEMA_VERSION,
        "backend": name,
        "corpus_digest": corpus_digest,
        **kind.recipe(),
    }


def open_or_build(
    folder: Path, corpus_path: Path, name: str, options: IndexOptions | None = None
) -> tuple[Index, Corpus, bool]:
    """Return (index, corpus, whether the index was built).

    Raises: OperatorError for an invalid corpus, or a folder that cannot be written or holds other files.
    """
    kind = kind_named(name, options)
    found = open_index(folder, digest_of(corpus_path), name, kind)
    if found is not None:
        return *found, False
    return *build_index(folder, corpus_path, name, kind), True


def content_hash(folder: Path) -> str:
    """Return the digest of an index's recipe: services with the same digest give the same answers."""
    return _digest_of_recipe(Manifest.model_validate_json((folder / MANIFEST).read_bytes()).recipe)


def open_index(
    folder: Path, corpus_digest: str, name: str, kind: IndexKind | None = None
) -> tuple[Index, Corpus] | None:
    """Return the index in folder and its corpus, or None if it is absent, damaged or has another recipe."""
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
    """Return the index and its corpus after replacing folder with them. Waits for other builders of the folder."""
    kind = kind or kind_named(name)
    folder = folder.resolve()  # replace the target of a link, not the link
    _refuse_other_folder(folder)
    aside = folder.with_name(f".{folder.name}.building")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with file_lock(folder.with_name(f".{folder.name}.lock"), wait_s=math.inf):
            shutil.rmtree(aside, ignore_errors=True)  # from a killed builder
            aside.mkdir()
            try:
                corpus = read_corpus(corpus_path, aside)
                recipe = recipe_of(name, kind, corpus.digest)
                scratch = _scratch(folder, recipe)
                index = kind.build(corpus, scratch)
                index.save(aside)
                _write_manifest(aside, recipe, len(corpus))
                _replace(folder, aside)
                shutil.rmtree(scratch, ignore_errors=True)
            finally:
                shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        raise OperatorError(
            f"retriever: the index cannot be written to {folder} ({error.strerror}). Choose another --index-path."
        ) from None
    return index, corpus


def _scratch(folder: Path, recipe: Mapping[str, str | int | float]) -> Path:
    """Return the folder for work that survives an interrupted build of the same recipe."""
    return folder.with_name(f".{folder.name}.encoded-{_digest_of_recipe(recipe)[:16]}")


def _digest_of_recipe(recipe: Mapping[str, str | int | float]) -> str:
    return blake3(json.dumps(recipe, sort_keys=True).encode()).hexdigest()


def _write_manifest(folder: Path, recipe: dict[str, str | int | float], num_documents: int) -> None:
    files = {path.name: _digest(path) for path in sorted(folder.iterdir())}
    manifest = Manifest(recipe=recipe, num_documents=num_documents, files=files)
    (folder / MANIFEST).write_text(manifest.model_dump_json(indent=1), encoding="utf-8")
    folder.chmod(0o755)


def _replace(folder: Path, new: Path) -> None:
    """Rename new to folder, after renaming an older index away. The caller holds the lock."""
    old = new.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.rename(folder, old)
    os.rename(new, folder)
    shutil.rmtree(old, ignore_errors=True)


def _refuse_other_folder(folder: Path) -> None:
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return  # absent, or just renamed away by another service
    except NotADirectoryError:
        names = [folder.name]
    if names and MANIFEST not in names:
        raise OperatorError(
            f"retriever: {folder} holds files that are not an index of this service. It was not changed. "
            "Choose another --index-path, or empty it."
        )


def _digest(path: Path) -> str:
    return blake3().update_mmap(path).hexdigest()
