"""The newest checkpoint is copied to the store in the background, whatever the store does meanwhile."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from learner.checkpoint.best import BestBy
from learner.checkpoint.copier import CheckpointCopier
from learner.checkpoint.copy_store import CopyStore, open_store
from learner.checkpoint.folder import begin, rotate
from learner.checkpoint.manifest import Checkpoint
from tests.fakes.checkpoints import commit
from tests.fakes.waiting import wait_until


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "my-run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "my-run" / "metrics.jsonl").write_text("a line\n")
    return tmp_path / "my-run"


@pytest.fixture
def store(tmp_path: Path) -> CopyStore:
    return open_store(f"file://{tmp_path}/store", "my-run")


def save(run: Path, step: int) -> Path:
    aside = begin(run / "checkpoints", step)
    (aside / "weights.bin").write_bytes(b"%d" % step)
    return commit(aside, Checkpoint(aside, step, step, run.name, "model-1")).path


def steps(store: CopyStore) -> list[int]:
    return [copy.step for copy in store.copies()]


def copier_of(store: CopyStore, run: Path, keep: int = 2, best_by: BestBy | None = None) -> CheckpointCopier:
    return CheckpointCopier(open_store(store.url, run.name), run, keep, best_by, poll_s=0.02, first_retry_s=0.05)


def finished(copier: CheckpointCopier) -> str:
    return copier.finish(lambda: False, 20.0)


def news_of(copier: CheckpointCopier) -> list[str]:
    """Return the first notices that come."""
    told: list[str] = []

    def is_told() -> bool:
        told.extend(copier.take_notices())
        return bool(told)

    wait_until(is_told)
    return told


def test_each_newest_checkpoint_is_copied_and_as_many_stay_as_are_wanted(run: Path, store: CopyStore) -> None:
    copier = copier_of(store, run)
    copier.start()
    save(run, 20)
    wait_until(lambda: steps(store) == [20])
    save(run, 40)
    wait_until(lambda: steps(store) == [20, 40])
    save(run, 60)
    assert finished(copier) == ""
    assert steps(store) == [40, 60]
    assert copier.take_notices() == []
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        "latest",
        "step_000020",
        "step_000040",
        "step_000060",
    ]


def test_store_that_fails_is_told_of_once_and_gets_the_newest_when_it_is_back(
    tmp_path: Path, run: Path, store: CopyStore
) -> None:
    (tmp_path / "store").write_text("no folder")
    save(run, 20)
    copier = copier_of(store, run)
    copier.start()
    told = news_of(copier)
    save(run, 40)
    (tmp_path / "store").unlink()
    wait_until(lambda: steps(store) == [40])
    assert finished(copier) == ""
    told += copier.take_notices()
    assert len(told) == 2
    assert told[0].startswith(f"{store.url}: copying the checkpoint of step 20 failed (")
    assert told[0].endswith("It is retried while training continues")
    assert told[1] == f"Checkpoints are copied to {store.url} again"


def test_end_does_not_wait_for_a_dead_store_once_the_run_is_told_to_stop(
    tmp_path: Path, run: Path, store: CopyStore
) -> None:
    (tmp_path / "store").write_text("no folder")
    save(run, 20)
    copier = copier_of(store, run)
    copier.start()
    wait_until(lambda: bool(copier.take_notices()))
    said = copier.finish(lambda: True, 0.1)
    assert said.startswith(f"The checkpoint of step 20 has no copy in {store.url}: ")


def test_run_that_went_back_copies_its_checkpoint_again_and_removes_later_steps(
    run: Path, store: CopyStore, tmp_path: Path
) -> None:
    saved = save(run, 20)
    store.put(saved, 20, {}, lambda: None)
    store.put(save(tmp_path / "before" / "my-run", 40), 40, {}, lambda: None)
    copier = copier_of(store, run)
    copier.start()
    assert finished(copier) == ""
    assert [(copy.number, copy.step) for copy in store.copies()] == [(3, 20)]
    assert len(list(Path(store.url.removeprefix("file://")).glob("my-run/*_step_*"))) == 1


def test_checkpoint_that_was_copied_before_is_not_copied_again(run: Path, store: CopyStore) -> None:
    store.put(save(run, 20), 20, {}, lambda: None)
    written = {path: path.stat().st_mtime_ns for path in Path(store.url.removeprefix("file://")).rglob("*.bin")}
    copier = copier_of(store, run)
    copier.start()
    assert finished(copier) == ""
    assert {path: path.stat().st_mtime_ns for path in written} == written


def test_second_run_of_the_name_is_noticed_and_its_copies_stay(run: Path, store: CopyStore, tmp_path: Path) -> None:
    copier = copier_of(store, run)
    copier.start()
    save(run, 20)
    wait_until(lambda: steps(store) == [20])
    store.put(save(tmp_path / "other" / "my-run", 90), 90, {}, lambda: None)
    save(run, 40)
    (notice,) = news_of(copier)
    assert re.search(
        r"0002_step_000090-\w+ is the newest, which this run did not copy: another run of this name", notice
    )
    assert finished(copier).endswith("is the newest, which this run did not copy.")
    assert steps(store) == [20, 90]


def test_checkpoint_that_is_rotated_away_meanwhile_is_copied_whole(run: Path, store: CopyStore) -> None:
    removed: list[Path] = []

    class RotatingStore(CopyStore):
        def put(self, folder: Path, step: int, records: Mapping[str, Path], on_progress: Callable[[], None]) -> str:
            if not removed:
                save(run, 40)
                removed.extend(rotate(run / "checkpoints", 1))
            return super().put(folder, step, records, on_progress)

    copier = CheckpointCopier(RotatingStore(store.url, run.name), run, 2)
    save(run, 20)
    copier.start()
    wait_until(lambda: steps(store)[-1:] == [40])
    assert finished(copier) == ""
    assert [path.name for path in removed] == ["step_000020"]
    assert steps(store) == [20, 40]


def evaluated(run: Path, scores: dict[int, float]) -> None:
    lines = (json.dumps({"step": step + 1, "eval_step": step, "eval_reward": score}) for step, score in scores.items())
    (run / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))


def test_best_copy_stays_where_its_checkpoint_is_another_machines_or_its_score_comes_late(
    run: Path, store: CopyStore, tmp_path: Path
) -> None:
    for step in (20, 25, 40, 45):
        store.put(save(tmp_path / "before" / "my-run", step), step, {}, lambda: None)
    evaluated(run, {20: 0.75})
    save(run, 50)
    copier = copier_of(store, run, keep=1, best_by=BestBy("eval_reward", is_highest=True, every_steps=20))
    copier.start()
    wait_until(lambda: steps(store) == [20, 40, 50])
    evaluated(run, {20: 0.75, 40: 0.5})
    save(run, 55)
    assert finished(copier) == ""
    assert steps(store) == [20, 55]


def test_links_that_a_killed_command_left_are_removed(run: Path, store: CopyStore) -> None:
    left = run / "checkpoints" / ".copying-step_000020"
    left.mkdir()
    (left / "weights.bin").write_bytes(b"of a checkpoint that was rotated away since")
    save(run, 40)
    copier = copier_of(store, run)
    copier.start()
    wait_until(lambda: steps(store) == [40])
    assert not left.exists()
