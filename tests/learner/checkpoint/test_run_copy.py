"""The copy of a run folder in a store: complete and intact, or not listed."""

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from learner.checkpoint.folder import begin
from learner.checkpoint.manifest import Checkpoint, verify
from learner.checkpoint.run_copy import RunCopy, StoreError
from protocol.errors import SettingsError
from tests.fakes.checkpoints import commit


@pytest.fixture(params=["file", "memory"])
def copy(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RunCopy]:
    """Yield an empty copy, in a folder or in memory."""
    yield RunCopy(f"file://{tmp_path}/store" if request.param == "file" else "memory://bucket/folder", "my-run")
    fsspec.filesystem("memory").store.clear()


def put(copy: RunCopy, run: Path, step: int, weights: bytes = b"weights") -> None:
    """Copy a new checkpoint with a file and a folder."""
    aside = begin(run / "checkpoints", step)
    (aside / "state").mkdir()
    (aside / "state" / "policy.bin").write_bytes(weights)
    (aside / "ledger.sqlite").write_bytes(b"")
    saved = commit(aside, Checkpoint(aside, step, step, "my-run", "model-1")).path
    copy.put(saved, step, run, lambda: None)


def write(copy: RunCopy, name: str, content: bytes) -> None:
    fs, root = fsspec.core.url_to_fs(copy.url)
    fs.makedirs(f"{root}/{name}".rpartition("/")[0], exist_ok=True)
    fs.pipe_file(f"{root}/{name}", content)


def folders(copy: RunCopy) -> set[str]:
    fs, root = fsspec.core.url_to_fs(copy.url)
    return {path.rpartition("/")[2] for path in fs.ls(f"{root}/checkpoints", detail=False)}


def test_checkpoint_is_listed_and_fetched_as_it_was(copy: RunCopy, tmp_path: Path) -> None:
    assert copy.steps() == []
    (tmp_path / "metrics.jsonl").write_text("one line\n")
    (tmp_path / "other.txt").write_text("not a record")
    put(copy, tmp_path, 100)
    assert copy.steps() == [100]
    fetched = tmp_path / "elsewhere"
    fetched.mkdir()
    copy.fetch(100, fetched / "step_000100", fetched)
    assert verify(fetched / "step_000100").step == 100
    assert (fetched / "step_000100" / "state" / "policy.bin").read_bytes() == b"weights"
    assert (fetched / "metrics.jsonl").read_text() == "one line\n"
    assert not (fetched / "other.txt").exists()


def test_checkpoint_without_its_manifest_is_not_listed(copy: RunCopy) -> None:
    write(copy, "checkpoints/step_000140/state/policy.bin", b"half")
    assert copy.steps() == []


def test_checkpoint_of_a_step_that_was_repeated_replaces_the_old_one(copy: RunCopy, tmp_path: Path) -> None:
    put(copy, tmp_path / "a", 100)
    write(copy, "checkpoints/step_000100/state/old.bin", b"a rank that the run does not have now")
    put(copy, tmp_path / "b", 100, b"others")
    copy.fetch(100, tmp_path / "fetched", tmp_path)
    assert verify(tmp_path / "fetched").step == 100


def test_other_checkpoints_are_removed_and_other_folders_stay(copy: RunCopy, tmp_path: Path) -> None:
    put(copy, tmp_path, 100)
    put(copy, tmp_path, 120)
    write(copy, "checkpoints/step_000140/state/policy.bin", b"half")
    write(copy, "checkpoints/notes/mine.txt", b"mine")
    copy.remove_all_but({100})
    assert folders(copy) == {"notes", "step_000100"}


def test_last_process_that_claims_a_copy_is_its_owner(copy: RunCopy) -> None:
    other = RunCopy(copy.url.removesuffix("/my-run"), "my-run")
    copy.claim()
    assert copy.is_own()
    other.claim()
    assert (copy.is_own(), other.is_own()) == (False, True)


def test_name_that_leads_out_of_the_folder_is_not_fetched(tmp_path: Path) -> None:
    copy, files = RunCopy("memory://out", "my-run"), fsspec.filesystem("memory").store
    put(copy, tmp_path, 100)
    at = "/out/my-run/checkpoints/step_000100"
    files[f"{at}/../../evil"] = files[f"{at}/MANIFEST.json"]
    with pytest.raises(StoreError, match="leads out of the folder"):
        copy.fetch(100, tmp_path / "fetched", tmp_path)
    files.clear()


def test_store_that_refuses_names_its_reason(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("no folder")
    with pytest.raises(StoreError, match=r"NotADirectoryError|FileExistsError"):
        RunCopy(f"file://{tmp_path}/store", "my-run").check_writable()


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("s4://bucket", "is of a kind that fsspec does not know. Give a URL such as s3://BUCKET/FOLDER"),
        ("gs://bucket", "needs a package that is not installed (Please install gcsfs to access Google Storage)"),
    ],
)
def test_url_that_fsspec_cannot_open_is_refused(url: str, problem: str) -> None:
    with pytest.raises(SettingsError) as refused:
        RunCopy(url, "my-run")
    assert str(refused.value).startswith(f"settings: learner.copy_checkpoints_to = {url} {problem}")
