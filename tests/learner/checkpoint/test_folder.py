"""Checkpoints: what makes one valid, which one is found, and what a bad disk leaves behind."""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from learner.checkpoint import manifest, sealed_files
from learner.checkpoint.folder import aside_folder, begin, newest_valid, open_checkpoint, rotate, set_aside_newer
from learner.checkpoint.manifest import MANIFEST, Checkpoint, CorruptCheckpointError, verify
from protocol.errors import OperatorError, SettingsError
from tests.fakes.checkpoints import commit


def save(root: Path, step: int, content: str = "weights") -> Checkpoint:
    aside = begin(root, step)
    (aside / "state").mkdir()
    (aside / "state" / "rank_0.pt").write_text(content)
    (aside / "ledger.sqlite").write_text(f"ledger {step}")
    return commit(aside, Checkpoint(aside, step, step - 1, "run-1", "model-1"))


def replace_by_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_a_link(path: Path) -> None:
    path.rename(path.parents[2] / "elsewhere")
    path.symlink_to(path.parents[2] / "elsewhere")


def test_committed_checkpoint_is_found_with_its_facts(tmp_path: Path) -> None:
    save(tmp_path, 7)
    assert newest_valid(tmp_path) == Checkpoint(tmp_path / "step_000007", 7, 6, "run-1", "model-1")


def test_latest_points_at_the_newest(tmp_path: Path) -> None:
    save(tmp_path, 7)
    save(tmp_path, 8)
    assert (tmp_path / "latest").resolve() == tmp_path / "step_000008"


@pytest.mark.parametrize(
    ("steps", "highest", "newest"),
    [((), None, None), ((999_999, 1_000_000), None, 1_000_000), ((1, 2, 3), 2, 2)],
)
def test_newest_is_the_highest_step_up_to_a_limit(
    tmp_path: Path, steps: tuple[int, ...], highest: int | None, newest: int | None
) -> None:
    for step in steps:
        save(tmp_path / "root", step)
    found = newest_valid(tmp_path / "root", highest)
    assert (found and found.step) == newest


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda c: (c / "state" / "rank_0.pt").write_text("weighty"), "differs from the manifest"),
        (lambda c: (c / "state" / "rank_0.pt").write_text("weight"), "differs from the manifest"),
        (lambda c: (c / "state" / "rank_0.pt").unlink(), "is missing"),
        (lambda c: (c / "state" / "rank_1.pt").write_text("x"), "is not in the manifest"),
        (lambda c: (c / MANIFEST).unlink(), "has no MANIFEST.json"),
        (lambda c: (c / MANIFEST).write_text("{"), "is not JSON"),
        (lambda c: (c / MANIFEST).write_text("[" * 100_000), "is not JSON"),
        (lambda c: (c / MANIFEST).write_text((c / MANIFEST).read_text() + " "), "was changed after it was written"),
        (lambda c: replace_by_a_pipe(c / "ledger.sqlite"), "is a device, socket or pipe"),
        (lambda c: (c / MANIFEST).write_text('{"schema": 3}'), "is not of schema 2"),
        (
            lambda c: (c / MANIFEST).write_text((c / MANIFEST).read_text().replace('"step": 8', '"step": 9')),
            "does not match its own hash",
        ),
        (lambda c: replace_by_a_link(c / "state" / "rank_0.pt"), "is a link"),
    ],
    ids=[
        "flipped",
        "truncated",
        "missing",
        "surplus",
        "no manifest",
        "torn manifest",
        "deep manifest",
        "spaced manifest",
        "pipe",
        "schema",
        "edited manifest",
        "link",
    ],
)
def test_damaged_checkpoint_is_named_and_passed_over(tmp_path: Path, damage: object, message: str) -> None:
    save(tmp_path, 7)
    newest = save(tmp_path, 8).path
    assert callable(damage)
    damage(newest)
    with pytest.raises(CorruptCheckpointError, match=message):
        verify(newest)
    found = newest_valid(tmp_path)
    assert found is not None
    assert found.step == 7


def test_checkpoint_of_version_0_1_0_is_refused_and_not_passed_over(tmp_path: Path) -> None:
    path = save(tmp_path, 7).path
    facts = json.loads((path / MANIFEST).read_bytes())
    del facts["sha256"]
    (path / MANIFEST).write_bytes(manifest._to_json({**facts, "schema": 1}))
    with pytest.raises(OperatorError, match=r"step_000007 is a checkpoint of Sluice 0\.1\.0\. Resume it with 0\.1\.0"):
        newest_valid(tmp_path)


def test_folder_that_cannot_be_listed_is_an_error_and_never_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        sealed_files.seal_files(tmp_path / "gone")
    problem = sealed_files.first_wrong_entry(tmp_path / "gone", {}, unlisted=())
    assert problem == f"{tmp_path / 'gone'} cannot be read: No such file or directory"


def test_unfinished_checkpoint_is_not_found_and_goes_with_the_next(tmp_path: Path) -> None:
    aside = begin(tmp_path, 7)
    (aside / "half").write_text("written")
    assert aside == aside_folder(tmp_path, 7)
    assert newest_valid(tmp_path) is None
    save(tmp_path, 8)
    assert not aside.exists()


def test_same_step_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, 7, "before")
    path = save(tmp_path, 7, "after").path
    assert (path / "state" / "rank_0.pt").read_text() == "after"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_000007"]


def test_folder_of_another_step_than_its_name_is_passed_over(tmp_path: Path) -> None:
    save(tmp_path, 7)
    save(tmp_path, 8).path.rename(tmp_path / "step_000009")
    found = newest_valid(tmp_path)
    assert found is not None
    assert found.step == 7


def test_rotate_keeps_the_newest_valid_ones(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    (tmp_path / "step_000004" / "ledger.sqlite").write_text("damaged")
    removed = rotate(tmp_path, keep=2)
    assert [path.name for path in removed] == ["step_000001"]
    found = newest_valid(tmp_path)
    assert found is not None
    assert found.step == 3


def test_named_path_without_a_checkpoint_is_a_wrong_setting(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"run.resume = .*nothing is not a valid checkpoint .*has no MANIFEST.json"):
        open_checkpoint(tmp_path / "nothing")


def test_named_path_may_be_latest(tmp_path: Path) -> None:
    save(tmp_path, 7)
    assert open_checkpoint(tmp_path / "latest").path == tmp_path / "step_000007"


def test_folder_that_cannot_be_written_is_the_operators(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file stands where the folder should be")
    with pytest.raises(
        OperatorError, match=r"checkpoints cannot be written: File exists. Free the disk or set run.dir"
    ):
        begin(tmp_path / "checkpoints", 1)


def test_failed_commit_leaves_the_older_checkpoint_and_no_rest(tmp_path: Path) -> None:
    save(tmp_path, 7)
    aside = begin(tmp_path, 8)
    (aside / "ledger.sqlite").symlink_to("nowhere")  # a file that cannot be read back
    with pytest.raises(OperatorError, match="older checkpoints are intact"):
        commit(aside, Checkpoint(aside, 8, 8, "run-1", "model-1"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_000007"]
    assert newest_valid(tmp_path) is not None


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The bytes that are hashed, by the folder that they are in."""
    read: Counter[str] = Counter()
    hash_file = sealed_files._hash

    def counted(path: Path, *rest: Any) -> str:
        read[path.parent.name.removeprefix(".tmp-")] += path.stat().st_size
        return hash_file(path, *rest)

    monkeypatch.setattr(sealed_files, "_hash", counted)
    return read


def test_saving_reads_a_checkpoint_twice_and_those_before_it_not_at_all(
    tmp_path: Path, bytes_read: Counter[str]
) -> None:
    verified: set[Path] = set()
    for step in (1, 2, 3):
        bytes_read.clear()
        aside = begin(tmp_path, step)
        (aside / "state").write_bytes(b"x" * 1000)
        verified.add(commit(aside, Checkpoint(aside, step, step, "run-1", "model-1")).path)
        rotate(tmp_path, 2, verified)

    assert bytes_read == {"step_000003": 2000}


def test_rotate_reads_folders_that_were_not_verified(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, "weights")
    (tmp_path / "step_000002" / "state" / "rank_0.pt").write_text("weighty")

    assert rotate(tmp_path, 2, verified={tmp_path / "step_000003"}) == []


def test_rotate_compares_only_sizes_of_verified_folders(tmp_path: Path) -> None:
    paths = {save(tmp_path, step, "weights").path for step in (1, 2, 3)}
    (tmp_path / "step_000002" / "state" / "rank_0.pt").write_text("cut")

    assert rotate(tmp_path, 2, verified=paths) == []


def test_commit_tells_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed_files, "_REPORT_EVERY_BYTES", 1 << 20)
    told: list[str] = []
    aside = begin(tmp_path, 1)
    (aside / "state").write_bytes(b"x" * (2 << 20))
    commit(aside, Checkpoint(aside, 1, 1, "run-1", "model-1"), told.append)

    assert told == ["syncing state", "hashing: 1 MiB", "hashing: 2 MiB", "reading back: 1 MiB", "reading back: 2 MiB"]


def test_latest_names_the_resumed_checkpoint_when_newer_ones_are_set_aside(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    set_aside_newer(tmp_path, 1)

    assert (tmp_path / "latest").resolve() == tmp_path / "step_000001"
    assert sorted(path.name for path in tmp_path.glob("set_aside_*")) == [
        "set_aside_step_000002",
        "set_aside_step_000003",
    ]
