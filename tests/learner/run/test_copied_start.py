"""A start that finds the run's newest checkpoint among its copies, on a machine that has nothing of the run."""

import fcntl
from pathlib import Path

import fsspec
import pytest

from learner.checkpoint.folder import begin, set_aside_newer
from learner.checkpoint.manifest import Checkpoint, verify
from learner.checkpoint.run_copy import RunCopy
from learner.run.copied_start import start_with_copies
from protocol.errors import OperatorError, SettingsError
from protocol.settings.evaluation import EvalSettings
from protocol.settings.loader import save_settings
from protocol.settings.settings import Settings
from tests.fakes.checkpoints import commit


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"


def settings(tmp_path: Path, url: str, **run: object) -> Settings:
    of_run = {"dir": str(tmp_path / "here"), "name": "my-run", "max_steps": 100, **run}
    return Settings.model_validate({"run": of_run, "learner": {"copy_checkpoints_to": url}})


def save(folder: Path, step: int) -> Path:
    aside = begin(folder / "checkpoints", step)
    (aside / "ledger.sqlite").write_bytes(b"%d" % step)
    return commit(aside, Checkpoint(aside, step, step, folder.name, "model-1")).path


def put(tmp_path: Path, url: str, step: int, name: str = "my-run", given: str = "my-run") -> None:
    """Leave a copy as the run would have from another machine. given: the run.name of its command."""
    there = tmp_path / f"there-{step}" / name
    checkpoint = save(there, step)
    (there / "metrics.jsonl").write_text(f'{{"step": {step}}}\n')
    save_settings(settings(tmp_path, url, name=given), there / "settings.yaml")
    RunCopy(url, name).put(checkpoint, step, there, lambda: None)


def test_machine_without_the_run_goes_on_from_the_newest_copy(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    put(tmp_path, url, 20)
    put(tmp_path, url, 40)
    start = start_with_copies(settings(tmp_path, url), "model-1")
    folder = tmp_path / "here" / "my-run"
    assert start.checkpoint == verify(folder / "checkpoints" / "step_000040")
    assert start.notice == f"Resuming {folder} from step 40."
    assert (folder / "metrics.jsonl").read_text() == '{"step": 40}\n'
    assert f"Fetching the checkpoint of step 40 from {url}/my-run." in capsys.readouterr().out


@pytest.mark.parametrize(("best", "fetched"), [("eval/held_out/reward", [20, 60]), (None, [60])])
def test_best_checkpoint_is_fetched_with_the_newest(
    tmp_path: Path, url: str, best: str | None, fetched: list[int]
) -> None:
    for step in (20, 40, 60):
        put(tmp_path, url, step)
    scores = ((20, 0.75), (40, 0.25), (60, 0.5))
    lines = [f'{{"step": {step}, "eval/step": {step}, "eval/held_out/reward": {score}}}\n' for step, score in scores]
    (tmp_path / "store" / "my-run" / "metrics.jsonl").write_text("".join(lines))
    evals = EvalSettings(every_steps=20, best=best)
    given = settings(tmp_path, url).model_copy(update={"eval": evals})
    assert start_with_copies(given, "model-1").step == 60
    root = tmp_path / "here" / "my-run" / "checkpoints"
    assert sorted(path.name for path in root.iterdir()) == [f"step_{step:06d}" for step in fetched]


def test_newer_copy_is_fetched_over_an_older_checkpoint_and_an_older_one_is_not(tmp_path: Path, url: str) -> None:
    save(tmp_path / "here" / "my-run", 30)
    put(tmp_path, url, 20)
    assert start_with_copies(settings(tmp_path, url), "model-1").step == 30
    put(tmp_path, url, 40)
    assert start_with_copies(settings(tmp_path, url), "model-1").step == 40


def test_copy_of_a_checkpoint_that_was_set_aside_here_is_not_gone_on_from(tmp_path: Path, url: str) -> None:
    root = tmp_path / "here" / "my-run" / "checkpoints"
    save(root.parent, 20)
    set_aside = save(root.parent, 40)
    RunCopy(url, "my-run").put(set_aside, 40, root.parent, lambda: None)
    set_aside_newer(root, 20)
    assert start_with_copies(settings(tmp_path, url), "model-1").step == 20


def test_copy_that_is_not_whole_refuses_a_start_that_has_nothing_else(tmp_path: Path, url: str) -> None:
    put(tmp_path, url, 20)
    (ledger,) = (tmp_path / "store").rglob("ledger.sqlite")
    ledger.write_bytes(b"99")
    with pytest.raises(OperatorError, match=r"the copy of step 20 is not whole .*ledger\.sqlite differs from"):
        start_with_copies(settings(tmp_path, url), "model-1")
    assert list((tmp_path / "here" / "my-run" / "checkpoints").glob("step_*")) == []


def test_copy_that_is_not_whole_is_passed_over_where_an_older_one_is(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    put(tmp_path, url, 20)
    put(tmp_path, url, 40)
    (newer,) = (tmp_path / "store").glob("my-run/checkpoints/step_000040/ledger.sqlite")
    newer.unlink()  # as by a rule of the store that removes old objects
    assert start_with_copies(settings(tmp_path, url), "model-1").step == 20
    assert "the copy of step 40 is not whole (" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "here" / "my-run" / "checkpoints").iterdir()} == {"step_000020"}


def test_run_that_begins_with_anothers_checkpoint_is_not_mixed_with_copies_under_its_name(
    tmp_path: Path, url: str
) -> None:
    put(tmp_path, url, 60)
    elsewhere = save(tmp_path / "elsewhere" / "other", 50)
    with pytest.raises(OperatorError, match="holds checkpoints of a run my-run, up to step 60, and this run of that"):
        start_with_copies(settings(tmp_path, url, resume=str(elsewhere)), "model-1")
    own = save(tmp_path / "here" / "my-run", 20)
    assert start_with_copies(settings(tmp_path, url, resume=str(own)), "model-1").step == 20


def test_store_that_cannot_be_asked_refuses_a_new_run_and_not_one_that_goes_on(tmp_path: Path, url: str) -> None:
    (tmp_path / "store").write_text("no folder")
    with pytest.raises(OperatorError) as refused:
        start_with_copies(settings(tmp_path, url), "model-1")
    assert str(refused.value).startswith(f"{url}/my-run (learner.copy_checkpoints_to) cannot be used: ")
    assert str(refused.value).endswith(
        "The run my-run has no checkpoint here, and may have copies there. Correct the setting, or leave it out."
    )
    save(tmp_path / "here" / "my-run", 30)
    start = start_with_copies(settings(tmp_path, url), "model-1")
    assert start.step == 30
    assert start.notice is not None
    assert start.notice.endswith("the run resumes without newer checkpoints from there.")


def test_new_run_is_not_mixed_with_copies_of_another_of_its_name(tmp_path: Path, url: str) -> None:
    put(tmp_path, url, 20)
    with pytest.raises(OperatorError) as refused:
        start_with_copies(settings(tmp_path, url, resume="never"), "model-1")
    assert str(refused.value) == (
        f"{url}/my-run holds checkpoints of a run my-run, up to step 20, and this run of that name is new: both would "
        "be mixed there. Choose another run.name or learner.copy_checkpoints_to. To continue that run, set run.resume "
        "to auto."
    )


def test_run_behind_a_complete_one_is_fetched_and_gone_on_with(tmp_path: Path, url: str) -> None:
    put(tmp_path, url, 100)
    put(tmp_path, url, 60, "my-run-2")
    start = start_with_copies(settings(tmp_path, url), "model-1")
    assert (start.run_id, start.step) == ("my-run-2", 60)
    put(tmp_path, url, 80, "my-run-2")
    assert start_with_copies(settings(tmp_path, url), "model-1").step == 80
    put(tmp_path, url, 100, "my-run-2")
    assert start_with_copies(settings(tmp_path, url), "model-1").run_id == "my-run-3"


def test_copies_of_another_run_that_has_the_next_name_stay(tmp_path: Path, url: str) -> None:
    put(tmp_path, url, 100)
    put(tmp_path, url, 60, "my-run-2", given="my-run-2")
    with pytest.raises(OperatorError, match="holds checkpoints of a run my-run-2, up to step 60, and this run of that"):
        start_with_copies(settings(tmp_path, url), "model-1")


def test_copy_of_another_model_is_refused(tmp_path: Path, url: str) -> None:
    put(tmp_path, url, 20)
    with pytest.raises(SettingsError, match=r"is a checkpoint of another model than policy\.model"):
        start_with_copies(settings(tmp_path, url), "model-2")


def test_run_that_another_command_has_is_not_fetched_into(tmp_path: Path, url: str) -> None:
    put(tmp_path, url, 20)
    (tmp_path / "here" / "my-run").mkdir(parents=True)
    with (tmp_path / "here" / "my-run" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(OperatorError, match="Another command is running in"):
            start_with_copies(settings(tmp_path, url), "model-1")


def test_store_in_memory_begins_empty(tmp_path: Path) -> None:
    assert start_with_copies(settings(tmp_path, "memory://empty/place"), "model-1").checkpoint is None
    fsspec.filesystem("memory").store.clear()
