"""The newest checkpoint is copied to the store in the background, whatever the store does meanwhile."""

from collections.abc import Callable
from pathlib import Path

import pytest

from learner.checkpoint.copier import CheckpointCopier
from learner.checkpoint.folder import begin, rotate
from learner.checkpoint.manifest import Checkpoint
from learner.checkpoint.run_copy import RunCopy
from tests.fakes.checkpoints import commit
from tests.fakes.waiting import wait_until


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "my-run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "my-run" / "metrics.jsonl").write_text("a line\n")
    return tmp_path / "my-run"


@pytest.fixture
def copy(tmp_path: Path) -> RunCopy:
    return RunCopy(f"file://{tmp_path}/store", "my-run")


def save(run: Path, step: int) -> Path:
    aside = begin(run / "checkpoints", step)
    (aside / "weights.bin").write_bytes(b"%d" % step)
    return commit(aside, Checkpoint(aside, step, step, run.name, "model-1")).path


def put(copy: RunCopy, run: Path, *steps: int) -> None:
    for step in steps:
        copy.put(save(run, step), step, run, lambda: None)


def started(tmp_path: Path, run: Path, keep: int = 2, kind: type[RunCopy] = RunCopy) -> CheckpointCopier:
    copier = CheckpointCopier(kind(f"file://{tmp_path}/store", run.name), run, keep, poll_s=0.02, first_retry_s=0.05)
    copier.start()
    return copier


def finished(copier: CheckpointCopier) -> str:
    return copier.finish(lambda: False, 20.0)


def notices_of(copier: CheckpointCopier) -> list[str]:
    """Return the first notices that come."""
    notices: list[str] = []

    def has_come() -> bool:
        notices.extend(copier.take_notices())
        return bool(notices)

    wait_until(has_come)
    return notices


def test_each_newest_checkpoint_is_copied_and_those_of_the_run_folder_stay(
    tmp_path: Path, run: Path, copy: RunCopy
) -> None:
    copier = started(tmp_path, run, keep=1)
    for step in (20, 40, 60):
        save(run, step)
        wait_until(lambda step=step: copy.steps()[-1:] == [step])
    rotate(run / "checkpoints", 1, protected={20})  # such as the best one
    save(run, 80)
    assert finished(copier) == ""
    assert copy.steps() == [20, 60, 80]
    assert copier.take_notices() == []
    names = {path.name for path in (run / "checkpoints").iterdir()}
    assert names == {"latest", "step_000020", "step_000060", "step_000080"}


def test_copies_that_the_run_folder_has_not_stay_up_to_the_wanted_number(
    tmp_path: Path, run: Path, copy: RunCopy
) -> None:
    put(copy, tmp_path / "elsewhere" / "my-run", 20, 40, 60)
    save(run, 80)
    assert finished(started(tmp_path, run)) == ""
    assert copy.steps() == [60, 80]


def test_failing_store_is_reported_once_and_gets_the_newest_when_it_works_again(
    tmp_path: Path, run: Path, copy: RunCopy
) -> None:
    (tmp_path / "store").write_text("no folder")
    save(run, 20)
    copier = started(tmp_path, run)
    notices = notices_of(copier)
    save(run, 40)
    (tmp_path / "store").unlink()
    wait_until(lambda: copy.steps() == [40])
    assert finished(copier) == ""
    notices += copier.take_notices()
    assert len(notices) == 2
    assert notices[0].startswith(f"{copy.url}: copying the checkpoint of step 20 failed (")
    assert notices[0].endswith("It is retried while training continues")
    assert notices[1] == f"Checkpoints are copied to {copy.url} again"


def test_end_of_a_stopped_run_does_not_wait_for_a_dead_store(tmp_path: Path, run: Path, copy: RunCopy) -> None:
    (tmp_path / "store").write_text("no folder")
    save(run, 20)
    copier = started(tmp_path, run)
    wait_until(lambda: bool(copier.take_notices()))
    warning = copier.finish(lambda: True, 0.1)
    assert warning.startswith(f"The checkpoint of step 20 has no copy in {copy.url}: ")


def test_copies_of_steps_that_the_run_left_are_removed(tmp_path: Path, run: Path, copy: RunCopy) -> None:
    put(copy, run, 20)
    put(copy, tmp_path / "before" / "my-run", 40)
    assert finished(started(tmp_path, run)) == ""
    assert copy.steps() == [20]


def test_checkpoint_that_was_copied_before_is_not_copied_again(tmp_path: Path, run: Path, copy: RunCopy) -> None:
    put(copy, run, 20)
    (weights,) = (tmp_path / "store").rglob("weights.bin")
    written_at = weights.stat().st_mtime_ns
    assert finished(started(tmp_path, run)) == ""
    assert weights.stat().st_mtime_ns == written_at


def test_run_stops_copying_when_another_one_of_its_name_copies(tmp_path: Path, run: Path, copy: RunCopy) -> None:
    copier = started(tmp_path, run)
    save(run, 20)
    wait_until(lambda: copy.steps() == [20])
    copy.claim()
    put(copy, tmp_path / "other" / "my-run", 90)
    save(run, 40)
    (notice,) = notices_of(copier)
    assert notice.startswith(f"{copy.url}: another run of this name copies there. This run's checkpoints are not")
    assert finished(copier).endswith("another run of this name copies there.")
    copier._thread.join()
    copier.start()  # by the run's next attempt
    assert copy.steps() == [20, 90]


def test_checkpoints_of_another_run_that_began_to_copy_meanwhile_stay(tmp_path: Path, run: Path, copy: RunCopy) -> None:
    class RivalledCopy(RunCopy):
        def put(self, checkpoint: Path, step: int, folder: Path, on_progress: Callable[[], None]) -> None:
            super().put(checkpoint, step, folder, on_progress)
            copy.claim()
            put(copy, tmp_path / "other" / "my-run", 90)

    save(run, 20)
    assert finished(started(tmp_path, run, kind=RivalledCopy)).endswith("another run of this name copies there.")
    assert copy.steps() == [20, 90]


def test_checkpoint_that_is_rotated_away_meanwhile_is_copied_whole(tmp_path: Path, run: Path, copy: RunCopy) -> None:
    removed: list[Path] = []

    class RotatingCopy(RunCopy):
        def put(self, checkpoint: Path, step: int, folder: Path, on_progress: Callable[[], None]) -> None:
            if not removed:
                save(run, 40)
                removed.extend(rotate(run / "checkpoints", 1))
            super().put(checkpoint, step, folder, on_progress)

    save(run, 20)
    assert finished(started(tmp_path, run, kind=RotatingCopy)) == ""
    assert [path.name for path in removed] == ["step_000020"]
    assert copy.steps() == [20, 40]


def test_links_that_a_killed_command_left_are_removed(tmp_path: Path, run: Path) -> None:
    left = run / "checkpoints" / ".copying-step_000020"
    left.mkdir()
    (left / "weights.bin").write_bytes(b"of a checkpoint that was rotated away since")
    save(run, 40)
    assert finished(started(tmp_path, run)) == ""
    assert not left.exists()
