"""Copies of checkpoints in a store: whole and right, or not there."""

import re
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from learner.checkpoint.copies.store import CopyStore, StoreError, open_store
from learner.checkpoint.folder import begin
from learner.checkpoint.manifest import Checkpoint, verify
from protocol.errors import SettingsError
from tests.fakes.checkpoints import commit


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CopyStore]:
    """Yield an empty store, in a folder or in memory."""
    where = f"file://{tmp_path}/store" if request.param == "file" else "memory://bucket/folder"
    yield open_store(where, "my-run")
    memory = fsspec.filesystem("memory")
    if memory.exists("/bucket"):
        memory.rm("/bucket", recursive=True)


def save(folder: Path, step: int, weights: bytes = b"weights") -> Path:
    """Return the folder of a whole checkpoint with a file in it and one in a folder of it."""
    aside = begin(folder / "checkpoints", step)
    (aside / "state").mkdir()
    (aside / "state" / "policy.bin").write_bytes(weights)
    (aside / "ledger.sqlite").write_bytes(b"")
    return commit(aside, Checkpoint(aside, step, step, "my-run", "model-1")).path


def corrupt(store: CopyStore, name: str, content: bytes) -> None:
    fs, root = fsspec.core.url_to_fs(store.url)
    fs.makedirs(f"{root}/my-run/{name}".rpartition("/")[0], exist_ok=True)
    fs.pipe_file(f"{root}/my-run/{name}", content)


def test_copy_that_was_put_is_listed_and_comes_back_as_it_was(store: CopyStore, tmp_path: Path) -> None:
    assert store.copies() == []
    lines = tmp_path / "metrics.jsonl"
    lines.write_text("one line\n")
    saved = save(tmp_path, 100)
    copy = store.put(saved, 100, {"metrics.jsonl": lines})
    assert store.copies() == [copy]
    assert re.fullmatch(r"step_000100-[0-9a-f]{16}", copy.name)
    assert (copy.step, copy.model_digest) == (100, "model-1")
    assert store.fetch(copy, tmp_path / "fetched") == {"metrics.jsonl": b"one line\n"}
    assert verify(tmp_path / "fetched").step == 100
    assert (tmp_path / "fetched" / "state" / "policy.bin").read_bytes() == b"weights"


def test_copies_of_one_step_lie_side_by_side(store: CopyStore, tmp_path: Path) -> None:
    first = store.put(save(tmp_path / "a", 100), 100, {})
    second = store.put(save(tmp_path / "b", 100, b"others"), 100, {})
    assert {copy.name for copy in store.copies()} == {first.name, second.name}


def test_copy_without_its_manifest_or_with_half_of_it_is_none(store: CopyStore, tmp_path: Path) -> None:
    saved = save(tmp_path, 100)
    copy = store.put(saved, 100, {})
    manifest = (saved / "MANIFEST.json").read_bytes()
    corrupt(store, f"{copy.name}/MANIFEST.json", manifest[: len(manifest) // 2])
    assert store.copies() == []
    store.put(saved, 100, {})
    assert store.copies() == [copy]


def test_copy_that_is_read_back_as_something_else_is_refused(store: CopyStore, tmp_path: Path) -> None:
    saved = save(tmp_path, 100)
    (saved / "state" / "policy.bin").write_bytes(b"flipped")
    with pytest.raises(StoreError, match=r"policy\.bin was read back with SHA-256"):
        store.put(saved, 100, {})
    assert store.copies() == []
    fs, root = fsspec.core.url_to_fs(store.url)
    assert fs.find(f"{root}/my-run") == []  # what stayed would keep a run from its own checkpoints on a full disk


def test_copies_of_steps_behind_which_the_run_went_back_stay_but_are_not_listed(
    store: CopyStore, tmp_path: Path
) -> None:
    first, left = (store.put(save(tmp_path, step), step, {}) for step in (100, 120))
    store.go_back(100)
    store.go_back(110)  # no copy is later: no mark is needed
    store.remove_unfinished()
    assert store.copies() == [first]
    again = store.put(save(tmp_path / "again", 120, b"others"), 120, {})
    assert (store.copies(), again.name) == ([first, again], f"step_000120-{again.digest}-g1")
    store.go_back(50)
    assert store.copies() == []
    fs, root = fsspec.core.url_to_fs(store.url)
    assert fs.exists(f"{root}/my-run/generation_1_from_000100")
    assert fs.exists(f"{root}/my-run/generation_2_from_000050")
    assert fs.cat_file(f"{root}/my-run/{left.name}/state/policy.bin") == b"weights"


def test_copy_of_a_left_past_is_copied_again_when_the_run_returns_to_it(store: CopyStore, tmp_path: Path) -> None:
    saved = save(tmp_path, 120)
    store.put(saved, 120, {})
    store.go_back(100)
    again = store.put(saved, 120, {})
    assert store.copies() == [again]
    assert again.name.endswith("-g1")


def test_what_was_never_finished_is_removed_and_other_folders_stay(store: CopyStore, tmp_path: Path) -> None:
    copy = store.put(save(tmp_path, 100), 100, {})
    corrupt(store, "step_000120-0123456789abcdef/state/policy.bin", b"half")
    corrupt(store, "notes/mine.txt", b"mine")
    store.remove_unfinished()
    fs, root = fsspec.core.url_to_fs(store.url)
    assert sorted(path.rpartition("/")[2] for path in fs.ls(f"{root}/my-run", detail=False)) == ["notes", copy.name]


def test_name_that_leads_out_of_the_folder_is_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store("memory://out", "my-run")
    copy = store.put(save(tmp_path, 100), 100, {})
    fsspec.filesystem("memory").store[f"/out/my-run/{copy.name}/../../evil"] = fsspec.filesystem("memory").store[
        f"/out/my-run/{copy.name}/MANIFEST.json"
    ]
    with pytest.raises(StoreError, match="leads out of the folder"):
        store.fetch(copy, tmp_path / "fetched")
    fsspec.filesystem("memory").store.clear()


def test_store_that_refuses_names_its_reason(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("no folder")
    with pytest.raises(StoreError, match=r"NotADirectoryError|FileExistsError"):
        open_store(f"file://{tmp_path}/store", "my-run").check_writable()


def test_url_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(SettingsError) as refused:
        open_store("s4://bucket", "my-run")
    assert str(refused.value) == (
        "settings: learner.copy_checkpoints_to = s4://bucket is of a kind that fsspec does not know. Give a URL such "
        "as s3://BUCKET/FOLDER, gs://BUCKET/FOLDER or file:///FOLDER."
    )


def test_url_whose_package_is_missing_says_which_and_how_to_install_it() -> None:
    with pytest.raises(SettingsError) as refused:
        open_store("gs://bucket", "my-run")
    assert str(refused.value) == (
        "settings: learner.copy_checkpoints_to = gs://bucket needs a package that is not installed (Please install "
        "gcsfs to access Google Storage). Install it here with uv pip install --python .venv/bin/python NAME; "
        f"s3fs and gcsfs have to be of version {fsspec.__version__}."
    )
