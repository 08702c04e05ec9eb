"""The audit command: exit status, what it prints, and that it reads runs in every state without writing."""

import hashlib
import json
import shutil
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest

from learner.audit import main
from learner.audit.report import audit_run_folder
from learner.checkpoint.folder import rotate
from learner.ledger.ledger import Ledger
from tests.learner.audit.audited_run import RunWriter, run_settings
from tests.learner.audit.broken_run import Good

VERDICT = (
    "The accounts of run1 hold: in 4 steps 6 prompts were trained exactly once, 3 skipped with a reason, 2 are under "
    "way, 9 are to come. Checkpoints that verify: step_000002, step_000004."
)


def digests(folder: Path) -> dict[str, str]:
    """Return the hash of every file but SQLite's lock table."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.endswith("-shm"))
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_audit_prints_the_accounts_and_exits_0_when_they_hold(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]
    assert lines[-1] == VERDICT
    assert ["0", "10", "6", "3", "1 leased", "0"] in cells
    assert ["1", "10", "0", "0", "1 leased", "9"] in cells
    assert ["trained", "12", "24", "41.4%", "2.0"] in cells
    assert ["stale", "1", "17", "29.3%", "17.0"] in cells


def test_audit_prints_what_broke_one_line_each_and_exits_1(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run / "checkpoints")
    with closing(sqlite3.connect(run / "ledger.sqlite")) as db:
        (group,) = db.execute('SELECT "group" FROM prompts WHERE position = 4').fetchone()
        db.execute("UPDATE prompts SET reason = NULL WHERE position = 4")
        db.commit()
    assert main([str(run)]) == 1
    assert capsys.readouterr().out.splitlines()[-2:] == [
        f"ledger.sqlite, group {group}: is skipped without a reason",
        "The accounts of run1 do not hold. Breaches: 1.",
    ]


def test_audit_prints_the_same_as_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    letter = facts["dead_letters"][0]
    assert (facts["holds"], facts["verdict"], facts["breaches"]) == (True, VERDICT, [])
    assert (facts["step"], facts["policy_version"], facts["num_starts"]) == (4, 3, 2)
    assert letter["reason"] == "reward:em: HTTP 501; HTTP 502; HTTP 503"
    assert letter["failures"][2] == {
        "sample_index": 1, "attempt": 3, "server": "s1", "boundary": "reward:em", "detail": "HTTP 503",
    }  # fmt: skip
    assert {t["what"]: t["num_tokens"] for t in facts["tokens"]} == {
        "trained": 24, "stale": 17, "failed": 9, "skipped": 8,
    }  # fmt: skip


def test_audit_names_a_breach_in_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "checkpoints" / "step_000002" / "MANIFEST.json").unlink()
    assert main([str(run), "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert facts["num_breaches"] == {"checkpoint": 1}
    assert facts["breaches"] == [
        {
            "rule": "checkpoint",
            "problem": "checkpoints/step_000002 has no MANIFEST.json",
            "file": "checkpoints/step_000002",
            "group": None,
            "step": None,
            "line": "checkpoints/step_000002: checkpoints/step_000002 has no MANIFEST.json",
        }
    ]


def test_audit_changes_nothing_in_the_folder_of_a_run_that_ended(run: Path) -> None:
    before = digests(run)
    assert main([str(run)]) == 0
    assert digests(run) == before
    assert not list(run.glob("*-shm"))


def test_audit_sees_what_a_run_under_way_has_committed_and_leaves_its_log_alone(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with closing(Ledger(run / "ledger.sqlite")) as ledger:
        ledger.add_failure("e0-x", 0, 1, "s1", "server", "s1 died")
        ledger.add_waste("e0-x", 0, 1, "lineage", 1000)
        ledger.commit()
        ledger.add_waste("e0-x", 0, 1, "not committed", 1000)
        before = digests(run)
        assert main([str(run), "--json"]) == 0
        assert digests(run) == before
    wasted = {t["what"]: t["num_tokens"] for t in json.loads(capsys.readouterr().out)["tokens"]}
    assert wasted["lineage"] == 1000
    assert "not committed" not in wasted


def test_audit_reads_the_write_ahead_log_of_a_run_that_was_killed(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    killed = tmp_path / "killed"
    with closing(Ledger(run / "ledger.sqlite")) as ledger:
        ledger.add_waste("e0-x", 0, 1, "lineage", 1000)
        ledger.commit()
        shutil.copytree(run, killed, symlinks=True)  # as SIGKILL would leave it: the log is not yet in the ledger
    (killed / "ledger.sqlite-shm").unlink()
    before = digests(killed)
    assert main([str(killed), "--json"]) == 0
    assert digests(killed) == before
    tokens = json.loads(capsys.readouterr().out)["tokens"]
    assert {"what": "lineage", "num_trajectories": 1, "num_tokens": 1000} in tokens


def test_audit_holds_at_every_moment_of_a_run(tmp_path: Path) -> None:
    """A run goes on, step by step as fast as it can, with checkpoints made and removed, while it is audited."""
    settings = run_settings(tmp_path / "run1", num_prompts=400, max_steps=200)
    writer = RunWriter(settings)

    def go_on() -> None:
        for step in range(1, 181):
            writer.train(step, writer.lease(2), staleness=0)
            if step % 10 == 0:
                writer.save(step)
                rotate(tmp_path / "run1" / "checkpoints", keep=2)

    thread = threading.Thread(target=go_on)
    thread.start()
    reports = []
    while thread.is_alive():
        reports.append(audit_run_folder(tmp_path / "run1"))
    thread.join()
    writer.close()
    reports.append(audit_run_folder(tmp_path / "run1"))
    assert [report.breaches.lines() for report in reports] == [[]] * len(reports)
    assert len({report.step for report in reports}) > 1
    assert reports[-1].step == 180


def test_audit_holds_for_a_run_that_has_not_begun(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run / "checkpoints")
    for name in ("ledger.sqlite", "metrics.jsonl"):
        (run / name).unlink()
    Ledger(run / "ledger.sqlite").close()
    assert main([str(run)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "The accounts of run1 hold: in 0 steps 0 prompts were trained exactly once, 0 skipped with a reason, 0 are "
        "under way, 10 are to come. Checkpoints that verify: none."
    )


def test_audit_takes_prompts_from_where_they_lie_now(run: Path, good: Good, capsys: pytest.CaptureFixture[str]) -> None:
    settings = run / "settings.yaml"
    settings.write_text(settings.read_text().replace(str(good[0].parent), "/gone"), encoding="utf-8")
    assert main([str(run)]) == 2
    assert capsys.readouterr().err == (
        "data: /gone/prompts.jsonl does not exist. Give a JSONL or Parquet file as data.train or data.eval. The audit "
        "compares the ledger with the prompts that the run was given: name the file with --data.\n"
    )
    assert main([str(run), "--data", str(good[0].parent / "prompts.jsonl")]) == 0


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [
        ("", "{run} does not exist. Give the folder of a run, such as runs/NAME.\n"),
        ("ledger.sqlite", "{run} has no ledger.sqlite. Give the folder of a run, such as runs/NAME.\n"),
        ("settings.yaml", "{run} has no settings.yaml. Give the folder of a run, such as runs/NAME.\n"),
    ],
)
def test_audit_exits_2_for_a_folder_that_is_no_run(
    run: Path, missing: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(run) if not missing else (run / missing).unlink()
    assert main([str(run)]) == 2
    assert capsys.readouterr().err == sentence.format(run=run)


def test_audit_says_when_the_ledger_is_no_database(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "ledger.sqlite").write_bytes(b"no database" * 100)
    assert main([str(run)]) == 1
    assert capsys.readouterr().err.startswith(f"The ledger {run}/ledger.sqlite cannot be read: file is not a database.")


def test_audit_refuses_a_ledger_of_a_newer_version(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(sqlite3.connect(run / "ledger.sqlite")) as db:
        db.execute("UPDATE meta SET value = '9' WHERE key = 'schema'")
        db.commit()
    assert main([str(run)]) == 1
    assert capsys.readouterr().err == (
        f"The ledger {run}/ledger.sqlite has schema 9, this version of Sluice knows 5. "
        "Use the version of Sluice that wrote it.\n"
    )
