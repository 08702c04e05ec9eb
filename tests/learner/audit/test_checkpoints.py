"""The audit's rules on checkpoints: whole, of the surviving lineage, and of one mind with the run's ledger."""

import json
import shutil
from contextlib import closing
from pathlib import Path

import pytest

from learner.audit.report import audit_run_folder
from learner.checkpoint.manifest import Checkpoint
from learner.ledger.ledger import Ledger
from tests.fakes.checkpoints import commit
from tests.learner.audit.broken_run import Good, break_ledger

STEP_4 = "checkpoints/step_000004"


def seal(path: Path, step: int, policy_version: int) -> None:
    """Give a checkpoint whose ledger was changed a manifest that says so."""
    (path / "MANIFEST.json").unlink()
    aside = path.rename(path.with_name(".tmp-sealed"))
    commit(aside, Checkpoint(aside, step, policy_version, "run1", "digest"))


def lines_of(folder: Path) -> list[str]:
    return audit_run_folder(folder).breaches.lines()


def test_audit_names_a_checkpoint_file_that_was_changed(run: Path) -> None:
    break_ledger(run / STEP_4 / "ledger.sqlite", [], "UPDATE prompts SET attempt = 2")
    (line,) = lines_of(run)
    assert line.startswith(f"{STEP_4}: {STEP_4}/ledger.sqlite differs from the manifest: ")


def test_audit_names_a_latest_that_points_at_nothing(run: Path) -> None:
    shutil.rmtree(run / STEP_4)
    assert lines_of(run) == ["checkpoints/latest: points at step_000004, which is not there"]


def test_audit_names_a_checkpoint_without_a_ledger(run: Path) -> None:
    (run / STEP_4 / "ledger.sqlite").unlink()
    (run / STEP_4 / "weights").write_bytes(b"w")
    seal(run / STEP_4, step=4, policy_version=3)
    assert lines_of(run) == [f"{STEP_4}/ledger.sqlite: is missing"]


def test_audit_names_a_checkpoint_whose_ledger_is_no_database(run: Path) -> None:
    (run / STEP_4 / "ledger.sqlite").write_bytes(b"no database" * 100)
    seal(run / STEP_4, step=4, policy_version=3)
    assert lines_of(run) == [f"{STEP_4}/ledger.sqlite: cannot be read: file is not a database"]


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE trajectories SET reward = 0.25 WHERE \"group\" = '{}' AND sample_index = 1",
        "UPDATE trajectories SET server = 's9' WHERE \"group\" = '{}' AND sample_index = 1",
        "DELETE FROM trajectories WHERE \"group\" = '{}' AND sample_index = 1",
    ],
)
def test_audit_names_trajectories_that_differ_between_checkpoint_and_ledger(
    run: Path, good: Good, statement: str
) -> None:
    group = good[1][7]
    break_ledger(run / "ledger.sqlite", [], statement.format(group))
    line = f"{STEP_4}/ledger.sqlite, group {group}, step 4: is not in the run's ledger as it is in this copy"
    assert line in lines_of(run)


def test_audit_names_a_skipped_prompt_that_the_ledger_tells_otherwise(run: Path, good: Good) -> None:
    break_ledger(run / "ledger.sqlite", [], "UPDATE prompts SET reason = 'another' WHERE position = 4")
    assert lines_of(run) == [
        f"{STEP_4}/ledger.sqlite, group {good[1][4]}: is not in the run's ledger as it is in this copy"
    ]


def test_audit_names_a_group_that_the_ledger_trained_and_the_checkpoint_did_not(run: Path, good: Good) -> None:
    group = good[1][7]
    for statement in ("UPDATE prompts SET state = 'ready'", "DELETE FROM trajectories"):
        break_ledger(run / STEP_4 / "ledger.sqlite", [], f"{statement} WHERE \"group\" = '{group}'")
    seal(run / STEP_4, step=4, policy_version=3)
    line = f"{STEP_4}/ledger.sqlite, group {group}, step 4: is accounted for in the run's ledger, but not in this copy"
    assert lines_of(run) == [line, line]


def test_audit_names_a_checkpoint_that_accounts_for_a_later_step(run: Path, good: Good) -> None:
    break_ledger(run / STEP_4 / "ledger.sqlite", [], "UPDATE prompts SET step = 5 WHERE position = 7")
    seal(run / STEP_4, step=4, policy_version=3)
    assert lines_of(run)[0] == (
        f"{STEP_4}/ledger.sqlite, group {good[1][7]}: is accounted for by step 5, after the checkpoint's step 4"
    )


def test_audit_names_a_checkpoint_of_another_policy_version(run: Path) -> None:
    seal(run / STEP_4, step=4, policy_version=2)
    assert lines_of(run) == [f"{STEP_4}/ledger.sqlite, step 4: is of policy version 2, by the run's ledger it is 3"]


def test_audit_names_a_checkpoint_after_the_ledgers_last_step(run: Path) -> None:
    (run / STEP_4).rename(run / "checkpoints" / "step_000006")
    seal(run / "checkpoints" / "step_000006", step=6, policy_version=3)
    assert lines_of(run) == ["checkpoints/step_000006/ledger.sqlite: is of step 6, the run's ledger ends at step 4"]


def test_audit_notes_a_checkpoint_of_a_start_that_the_run_did_not_go_on_from(run: Path) -> None:
    shutil.copyfile(run / "checkpoints" / "step_000002" / "ledger.sqlite", run / "ledger.sqlite")
    metrics = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(metrics[:2]), encoding="utf-8")
    with closing(Ledger(run / "ledger.sqlite")) as ledger:
        assert ledger.begin_incarnation(policy_version=2) == 3
    report = audit_run_folder(run)
    assert report.breaches.lines() == []
    assert report.notes == [f"{STEP_4} was made by start 2; the run continued from an older checkpoint."]
    assert report.checkpoints == ["step_000002", "step_000004"]


@pytest.mark.parametrize(("inside", "is_named"), [(3, False), (4, True), (0, True)])
def test_audit_names_a_checkpoint_with_other_updates_than_its_steps_count(
    run: Path, inside: int, is_named: bool
) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line, num_updates in zip(lines, (1, 1, 0, 1), strict=True):
        line |= {"policy/loss": 0.5, "policy/num_updates": num_updates}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / STEP_4 / "state" / "policy").mkdir(parents=True)
    (run / STEP_4 / "state" / "policy" / "state.json").write_text(json.dumps({"num_updates": inside}))
    seal(run / STEP_4, step=4, policy_version=3)
    expected = (
        f"{STEP_4}/state/policy/state.json: has {inside} updates of the policy, metrics.jsonl counts 3 up to step 4"
    )
    assert lines_of(run) == ([expected] if is_named else [])
