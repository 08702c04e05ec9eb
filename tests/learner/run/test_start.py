"""The run folder: made whole or not at all."""

import contextlib
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from learner.checkpoint.folder import begin, newest_valid
from learner.checkpoint.manifest import Checkpoint, RefusedCheckpointError
from learner.ledger.ledger import Ledger
from learner.run.refused_start import undone_if_refused
from learner.run.start import RunStart, lock_folder, plan_restart, plan_start, prepare_folder, set_refused_aside
from protocol.errors import OperatorError, SettingsError
from protocol.settings.run import RunSettings
from protocol.settings.settings import Settings
from tests.fakes.checkpoints import commit

# A disk that refuses every byte: files of size 0 may still be made, as on a disk that fills up between check and write.
_ON_A_FULL_DISK = """
import resource, sys
from pathlib import Path
from learner.run.start import RunStart, prepare_folder
from protocol.errors import OperatorError
from protocol.settings.settings import Settings
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
try:
    prepare_folder(RunStart(Path(sys.argv[1]), None), Settings())
except OperatorError as error:
    print(error)
"""


def test_prepare_makes_a_folder_with_its_settings(tmp_path: Path) -> None:
    prepare_folder(RunStart(tmp_path / "runs" / "a", None), Settings())
    assert sorted(path.name for path in (tmp_path / "runs" / "a").iterdir()) == [
        "checkpoints",
        "given.yaml",
        "installation.json",
        "logs",
        "settings.yaml",
    ]


def test_prepare_sets_aside_the_accounts_of_a_life_without_a_checkpoint(tmp_path: Path) -> None:
    for name in ("ledger.sqlite", "metrics.jsonl"):
        (tmp_path / name).write_text("old", encoding="utf-8")
    prepare_folder(RunStart(tmp_path, None), Settings())
    assert {path.name for path in tmp_path.iterdir()}.isdisjoint({"ledger.sqlite", "metrics.jsonl"})
    aside = sorted(path.name.split("_", 2)[2] for path in (tmp_path / "logs").iterdir())
    assert aside == ["ledger.sqlite", "metrics.jsonl"]


def test_prepare_leaves_no_new_folder_when_the_disk_is_full(tmp_path: Path) -> None:
    folder = tmp_path / "full"
    finished = subprocess.run(
        [sys.executable, "-c", _ON_A_FULL_DISK, str(folder)], capture_output=True, text=True, check=True
    )
    assert finished.stdout == (
        f"The run folder {folder} cannot be written: File too large. Set run.dir to a folder on a disk with room.\n"
    )
    assert not folder.exists()


def test_prepare_keeps_a_folder_that_was_there_before(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("in the way", encoding="utf-8")
    with pytest.raises(OperatorError, match=f"The run folder {tmp_path} cannot be written: File exists."):
        prepare_folder(RunStart(tmp_path, None), Settings())
    assert (tmp_path / "checkpoints").read_text(encoding="utf-8") == "in the way"


# -- a folder that holds a run ----------------------------------------------------------------------------------------


def save(folder: Path, step: int, wandb_id: str | None = None) -> Checkpoint:
    """Save a checkpoint whose ledger says of which folder and step it is."""
    aside = begin(folder / "checkpoints", step)
    ledger = Ledger(aside / "writing.sqlite")
    ledger.set_meta("of", f"{folder.name} {step}")
    ledger.begin_copy(aside / "ledger.sqlite").make()
    ledger.close()
    (aside / "writing.sqlite").unlink()
    if wandb_id is not None:
        (aside / "wandb_run_id").write_text(wandb_id)
    return commit(aside, Checkpoint(aside, step, step, folder.name, "model-1"))


def ledger_of(folder: Path) -> str:
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as db:
        return str(db.execute("SELECT value FROM meta WHERE key = 'of'").fetchone()[0])


def settings_of(folder: Path, resume: str = "auto") -> RunSettings:
    return RunSettings(dir=str(folder.parent), name=folder.name, resume=resume, max_steps=100)


def start(folder: Path, resume: str = "auto") -> RunStart:
    planned = plan_start(settings_of(folder, resume), "model-1")
    prepare_folder(planned, Settings())
    return planned


def steps(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder whose checkpoints are of steps 2, 4 and 6 and whose ledger is further."""
    folder = tmp_path / "runs" / "a"
    for step in (2, 4, 6):
        save(folder, step)
    ledger = Ledger(folder / "ledger.sqlite")
    ledger.set_meta("of", "a 7")
    ledger.close()
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(8)) + '{"step": 8')
    return folder


def entries(folder: Path) -> dict[str, bytes | str]:
    """Return the content of each file and link of a folder."""
    paths = [path for path in folder.rglob("*") if path.is_symlink() or path.is_file()]
    return {str(path): str(path.readlink()) if path.is_symlink() else path.read_bytes() for path in paths}


@pytest.mark.parametrize("resume", ["auto", "step_000002", None])
@pytest.mark.parametrize("is_refused", [True, False])
def test_start_that_is_refused_or_stopped_leaves_the_folder_as_it_was(
    folder: Path, resume: str | None, is_refused: bool
) -> None:
    start(folder)
    (folder / "metrics.jsonl").write_text('{"step": 6}\n{"step": 7}\n')
    (folder / "skipped_rows.json").write_text("[]")
    before = entries(folder)
    named = str(folder / "checkpoints" / resume) if resume and resume != "auto" else "auto"
    planned = plan_start(settings_of(folder, named), "model-1") if resume else RunStart(folder, None)

    with contextlib.suppress(SettingsError), undone_if_refused(folder):
        prepare_folder(planned, Settings.model_validate({"run": {"seed": 5}}))
        (folder / "skipped_rows.json").unlink()
        Ledger(folder / "ledger.sqlite").close()
        if is_refused:
            raise SettingsError("refused")
    assert entries(folder) == before


def test_checkpoint_of_another_run_that_leaves_no_step_is_refused_with_the_model_to_begin_from(folder: Path) -> None:
    named = folder / "checkpoints" / "step_000006"
    run = settings_of(folder.with_name("b"), str(named)).model_copy(update={"max_steps": 6})
    with pytest.raises(
        SettingsError, match=f"of step 6, and run.max_steps is 6: no step .* policy.model to {named}/model"
    ):
        plan_start(run, "model-1")


def test_start_goes_back_to_the_newest_checkpoint(folder: Path) -> None:
    planned = start(folder)
    assert (planned.step, planned.notice) == (6, f"Resuming {folder} from step 6.")
    assert ledger_of(folder) == "a 6"
    assert (folder / "metrics.jsonl").read_text().splitlines() == [f'{{"step": {step}}}' for step in range(7)]
    assert steps(folder) == ["latest", "step_000002", "step_000004", "step_000006"]


def test_start_goes_back_to_the_newest_checkpoint_when_the_ledger_is_lost(folder: Path) -> None:
    (folder / "ledger.sqlite").unlink()
    assert start(folder).step == 6
    assert ledger_of(folder) == "a 6"


def test_start_removes_the_log_of_the_ledger_that_it_replaces(folder: Path) -> None:
    writer = Ledger(folder / "ledger.sqlite")
    writer.set_meta("of", "a later step, in the log alone")
    writer.commit()
    assert (folder / "ledger.sqlite-wal").exists()
    start(folder)
    assert not (folder / "ledger.sqlite-wal").exists()
    assert ledger_of(folder) == "a 6"
    writer.close()


def test_start_sets_a_corrupt_newest_checkpoint_aside_and_says_so(folder: Path) -> None:
    (folder / "checkpoints" / "step_000006" / "ledger.sqlite").write_bytes(b"damaged")
    planned = start(folder)
    assert planned.step == 4
    assert planned.notice == (
        f"Resuming {folder} from step 4. Set aside, because corrupt or of repeated steps: step_000006."
    )
    assert steps(folder) == ["latest", "set_aside_step_000006", "step_000002", "step_000004"]
    assert (folder / "checkpoints" / "latest").readlink() == Path("step_000004")


def test_run_that_was_put_back_to_an_older_checkpoint_does_not_find_the_newer_ones(folder: Path) -> None:
    start(folder, str(folder / "checkpoints" / "step_000002"))
    assert steps(folder) == ["latest", "set_aside_step_000004", "set_aside_step_000006", "step_000002"]
    assert plan_start(settings_of(folder), "model-1").step == 2
    save(folder, 4)
    assert start(folder, str(folder / "checkpoints" / "step_000002")).step == 2
    assert "set_aside_step_000004-2" in steps(folder)


def test_checkpoint_of_another_run_is_refused_in_a_used_folder(folder: Path, tmp_path: Path) -> None:
    elsewhere = save(tmp_path / "runs" / "b", 4).path
    with pytest.raises(SettingsError, match=r"b/checkpoints/step_000004 is not a checkpoint of .*/a, which holds"):
        plan_start(settings_of(folder, str(elsewhere)), "model-1")


@pytest.mark.parametrize("name", ["b", "c"])
def test_command_that_names_a_checkpoint_resumes_from_what_it_made_since(tmp_path: Path, name: str) -> None:
    """The checkpoint is of another run, or an older one of the run's own."""
    folder, named = tmp_path / "runs" / "c", save(tmp_path / "runs" / name, 4).path
    run = settings_of(folder, str(named))
    for _ in range(2):  # the first start crashes
        planned = plan_start(run, "model-1")
        prepare_folder(planned, Settings(run=run))
        assert (planned.step, ledger_of(folder), plan_restart(planned).step) == (4, f"{name} 4", 4)
        kept = (folder / "metrics.jsonl").read_text() if (folder / "metrics.jsonl").exists() else None
        (folder / "metrics.jsonl").write_text('{"step": 4}\n{"step": 5}\n')
    assert kept == ("" if name == "b" else '{"step": 4}\n')
    save(folder, 6)
    assert plan_restart(planned).step == plan_start(run, "model-1").step == 6
    save(folder, 100)
    with pytest.raises(SettingsError, match=r"c is complete at step 100\. Choose another run\.name\."):
        plan_start(run, "model-1")


def test_restart_falls_back_when_the_checkpoint_that_it_started_from_is_damaged(folder: Path) -> None:
    planned = start(folder)
    (folder / "checkpoints" / "step_000006" / "ledger.sqlite").write_bytes(b"damaged")
    assert plan_restart(planned).step == 4


def test_resume_never_refuses_a_folder_with_checkpoints_alone(folder: Path) -> None:
    (folder / "ledger.sqlite").unlink()
    with pytest.raises(SettingsError, match=r"run.resume = never, and .*a holds a run already"):
        plan_start(settings_of(folder, "never"), "model-1")


def test_wandb_page_comes_back_with_the_checkpoint_of_the_same_run(tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "old" / "a", 2, wandb_id="page-1").path
    start(tmp_path / "new" / "a", str(checkpoint))
    assert (tmp_path / "new" / "a" / "wandb_run_id").read_text() == "page-1"
    start(tmp_path / "new" / "another-run", str(checkpoint))
    assert not (tmp_path / "new" / "another-run" / "wandb_run_id").exists()


@pytest.mark.parametrize("name", ["a", "b"])
def test_command_that_named_a_checkpoint_resumes_after_its_removal(folder: Path, name: str) -> None:
    named = folder / "checkpoints" / "step_000002"
    run = settings_of(folder.with_name(name), str(named))
    prepare_folder(plan_start(run, "model-1"), Settings(run=run))
    save(folder.with_name(name), 8)
    shutil.rmtree(named)  # as a run removes its older checkpoints
    assert plan_start(run, "model-1").step == 8


def test_copy_of_a_run_folder_begins_a_wandb_page_of_its_own(tmp_path: Path) -> None:
    save(tmp_path / "a", 2, wandb_id="page-1")
    (tmp_path / "a" / "wandb_run_id").write_text("page-1")
    shutil.copytree(tmp_path / "a", tmp_path / "b", symlinks=True)
    start(tmp_path / "b")
    assert not (tmp_path / "b" / "wandb_run_id").exists()


def test_run_folder_resumes_after_a_copy_that_followed_its_links(folder: Path) -> None:
    copy = shutil.copytree(folder, folder.with_name("copy"))
    start(copy)
    assert (copy / "checkpoints" / "latest").readlink() == Path("step_000006")
    assert steps(copy) == ["latest", "set_aside_latest", "step_000002", "step_000004", "step_000006"]


@pytest.mark.parametrize("name", ["models.json", "search_index"])
def test_run_that_continues_another_knows_what_that_one_began_with(tmp_path: Path, name: str) -> None:
    checkpoint = save(tmp_path / "runs" / "b", 4).path
    (tmp_path / "runs" / "b" / name).write_text("digest")
    for _ in range(2):
        start(tmp_path / "runs" / "c", str(checkpoint))
        assert (tmp_path / "runs" / "c" / name).read_text() == "digest"


def test_accounts_without_a_checkpoint_are_set_aside_with_the_log_that_belongs_to_them(tmp_path: Path) -> None:
    (tmp_path / "runs" / "a").mkdir(parents=True)
    writer = Ledger(tmp_path / "runs" / "a" / "ledger.sqlite")
    writer.set_meta("of", "in the log alone")
    writer.commit()
    start(tmp_path / "runs" / "a")
    (aside,) = (tmp_path / "runs" / "a" / "logs").glob("before_*_ledger.sqlite")
    with closing(sqlite3.connect(aside)) as db:
        assert db.execute("SELECT value FROM meta WHERE key = 'of'").fetchall() == [("in the log alone",)]
    assert not (tmp_path / "runs" / "a" / "ledger.sqlite").exists()
    writer.close()


def test_folder_that_a_command_holds_is_refused_to_another_until_that_ends(tmp_path: Path) -> None:
    planned = plan_start(settings_of(tmp_path / "run"), "model-1")
    with (
        lock_folder(planned),
        pytest.raises(OperatorError, match="Another command is running in"),
        lock_folder(planned),
    ):
        pass
    with lock_folder(planned):
        pass


@pytest.mark.parametrize("saved", [[], [3]])
def test_start_that_was_planned_before_another_command_saved_is_refused(tmp_path: Path, saved: list[int]) -> None:
    """It would begin over what that one left: its ledger set aside, its newest checkpoints found by the next start."""
    folder = tmp_path / "run"
    for step in saved:
        save(folder, step)
    planned = plan_start(settings_of(folder), "model-1")
    save(folder, 4)
    with (
        pytest.raises(OperatorError, match=r"Another command trained in .* Give this command again"),
        lock_folder(planned),
    ):
        pass
    again = plan_start(settings_of(folder), "model-1")
    assert again.step == 4
    with lock_folder(again):
        pass


def test_free_name_that_another_command_took_meanwhile_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "run", 100)
    planned = plan_start(settings_of(tmp_path / "run"), "model-1")
    assert planned.run_id == "run-2"
    save(tmp_path / "run-2", 1)
    with pytest.raises(OperatorError, match="Another command trained in"), lock_folder(planned):
        pass


# -- behind a run that is complete


@pytest.fixture
def second(tmp_path: Path) -> RunStart:
    """The start of the run that the same command begins once the run `a` is complete."""
    save(tmp_path / "a", 100)
    return begun(tmp_path / "a")


def begun(folder: Path) -> RunStart:
    """Start a run as its command does, with settings.yaml of that command."""
    run = settings_of(folder)
    planned = plan_start(run, "model-1")
    prepare_folder(planned, Settings(run=run))
    return planned


def test_run_behind_a_complete_one_is_gone_on_with_by_the_same_command(second: RunStart) -> None:
    assert (second.run_id, second.checkpoint) == ("a-2", None)
    complete = second.folder.with_name("a")
    for step in (40, 60):
        save(second.folder, step)
    again = begun(complete)
    assert (again.folder, again.step) == (second.folder, 60)
    assert again.notice == f"{complete} is complete at step 100. Resuming {second.folder} from step 60."
    save(second.folder, 100)
    assert begun(complete).run_id == "a-3"


def test_run_behind_a_complete_one_that_has_no_checkpoint_yet_is_begun_again(second: RunStart) -> None:
    again = begun(second.folder.with_name("a"))
    assert (again.folder, again.checkpoint) == (second.folder, None)
    assert again.notice is not None
    assert again.notice.endswith("-2 holds a run without a valid checkpoint: it starts again from step 0.")


def test_run_that_has_the_next_name_by_its_own_settings_is_not_gone_on_with(tmp_path: Path) -> None:
    save(tmp_path / "a", 100)
    begun(tmp_path / "a-2")
    save(tmp_path / "a-2", 40)
    assert begun(tmp_path / "a").run_id == "a-3"


def test_run_of_another_model_behind_a_complete_one_is_not_gone_on_with(second: RunStart) -> None:
    save(second.folder, 40)
    assert plan_start(settings_of(second.folder.with_name("a")), "model-2").run_id == "a-3"


def test_a_refused_checkpoint_is_set_aside_and_the_next_newest_is_used(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for step in (2, 4):
        save(folder, step)
    start = RunStart(folder, newest_valid(folder / "checkpoints"))
    set_refused_aside(start, RefusedCheckpointError("so"))
    assert plan_restart(start).step == 2
    assert (folder / "checkpoints" / "set_aside_step_000004").is_dir()


def test_a_refused_checkpoint_that_the_operator_named_ends_the_start(tmp_path: Path) -> None:
    named = save(tmp_path / "other", 4)
    with pytest.raises(RefusedCheckpointError, match="so"):
        set_refused_aside(RunStart(tmp_path / "run", named), RefusedCheckpointError("so"))
    assert named.path.is_dir()
