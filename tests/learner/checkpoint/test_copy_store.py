"""Copies of checkpoints in a store: complete and intact, or not listed."""

import re
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from learner.checkpoint.copy_store import CopyStore, StoreError, open_store
from learner.checkpoint.folder import begin
from learner.checkpoint.manifest import Checkpoint, verify
from protocol.errors import SettingsError
from tests.fakes.checkpoints import commit


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CopyStore]:
    """Yield an empty store, in a folder or in memory."""
    yield open_store(f"file://{tmp_path}/store" if request.param == "file" else "memory://bucket/folder", "my-run")
    fsspec.filesystem("memory").store.clear()


def put(store: CopyStore, folder: Path, step: int, weights: bytes = b"weights", **records: Path) -> str:
    """Copy a new checkpoint with a file and a folder; returns the copy's name."""
    aside = begin(folder / "checkpoints", step)
    (aside / "state").mkdir()
    (aside / "state" / "policy.bin").write_bytes(weights)
    (aside / "ledger.sqlite").write_bytes(b"")
    saved = commit(aside, Checkpoint(aside, step, step, "my-run", "model-1")).path
    return store.put(saved, step, {f"{name}.jsonl": path for name, path in records.items()}, lambda: None)


def names(store: CopyStore) -> list[str]:
    return [copy.name for copy in store.copies()]


def write(store: CopyStore, name: str, content: bytes) -> None:
    fs, root = fsspec.core.url_to_fs(store.url)
    fs.makedirs(f"{root}/my-run/{name}".rpartition("/")[0], exist_ok=True)
    fs.pipe_file(f"{root}/my-run/{name}", content)


def folders(store: CopyStore) -> set[str]:
    fs, root = fsspec.core.url_to_fs(store.url)
    return {path.rpartition("/")[2] for path in fs.ls(f"{root}/my-run", detail=False)}


def test_copy_is_listed_and_fetched_as_it_was(store: CopyStore, tmp_path: Path) -> None:
    assert store.copies() == []
    lines = tmp_path / "metrics.jsonl"
    lines.write_text("one line\n")
    name = put(store, tmp_path, 100, metrics=lines)
    (copy,) = store.copies()
    assert copy.name == name
    assert re.fullmatch(r"0001_step_000100-[0-9a-f]{16}", name)
    assert (copy.step, copy.model_digest) == (100, "model-1")
    assert store.record(copy, "metrics.jsonl") == b"one line\n"
    assert store.fetch(copy, tmp_path / "fetched") == {"metrics.jsonl": b"one line\n"}
    assert verify(tmp_path / "fetched").step == 100
    assert (tmp_path / "fetched" / "state" / "policy.bin").read_bytes() == b"weights"


def test_copy_without_a_whole_manifest_is_not_listed(store: CopyStore, tmp_path: Path) -> None:
    name = put(store, tmp_path, 100)
    write(store, f"{name}/MANIFEST.json", (tmp_path / "checkpoints/step_000100/MANIFEST.json").read_bytes()[:50])
    assert store.copies() == []


def test_copies_of_a_past_that_the_run_left_are_not_listed(store: CopyStore, tmp_path: Path) -> None:
    first, _ = put(store, tmp_path / "a", 100), put(store, tmp_path / "a", 120)
    again = put(store, tmp_path / "b", 100, b"others")
    assert names(store) == [again]
    later = put(store, tmp_path / "b", 140)
    assert names(store) == [again, later]
    assert first in folders(store)


def test_copies_of_version_0_1_are_listed_before_numbered_ones(store: CopyStore, tmp_path: Path) -> None:
    numbered = put(store, tmp_path, 100)
    old = numbered.removeprefix("0001_")
    fs, root = fsspec.core.url_to_fs(store.url)
    fs.mv(f"{root}/my-run/{numbered}", f"{root}/my-run/{old}", recursive=True)
    assert names(store) == [old]
    later = put(store, tmp_path, 120)
    assert names(store) == [old, later]


def test_other_copies_are_removed_and_other_folders_stay(store: CopyStore, tmp_path: Path) -> None:
    kept, _ = put(store, tmp_path, 100), put(store, tmp_path, 120)
    write(store, "0007_step_000140-0123456789abcdef/state/policy.bin", b"half")
    write(store, "notes/mine.txt", b"mine")
    store.remove_all_but([kept])
    assert folders(store) == {"notes", kept}


def test_name_that_leads_out_of_the_folder_is_not_fetched(tmp_path: Path) -> None:
    store, files = open_store("memory://out", "my-run"), fsspec.filesystem("memory").store
    name = put(store, tmp_path, 100)
    files[f"/out/my-run/{name}/../../evil"] = files[f"/out/my-run/{name}/MANIFEST.json"]
    with pytest.raises(StoreError, match="leads out of the folder"):
        store.fetch(store.copies()[0], tmp_path / "fetched")
    files.clear()


def test_store_that_refuses_names_its_reason(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("no folder")
    with pytest.raises(StoreError, match=r"NotADirectoryError|FileExistsError"):
        open_store(f"file://{tmp_path}/store", "my-run").check_writable()


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("s4://bucket", "is of a kind that fsspec does not know. Give a URL such as s3://BUCKET/FOLDER"),
        ("gs://bucket", "needs a package that is not installed (Please install gcsfs to access Google Storage)"),
    ],
)
def test_url_that_fsspec_cannot_open_is_refused(url: str, problem: str) -> None:
    with pytest.raises(SettingsError) as refused:
        open_store(url, "my-run")
    assert str(refused.value).startswith(f"settings: learner.copy_checkpoints_to = {url} {problem}")
