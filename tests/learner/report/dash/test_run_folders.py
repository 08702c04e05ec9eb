"""Run folders in every state: going, killed, copied, unreadable, before the first checkpoint, many at once."""

import json
import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from learner.report.dash.runs import Runs
from protocol.disk.lock import file_lock
from tests.learner.report.dash.page import STEPS, Page, make_runs, read_lines, set_max_steps
from tests.learner.report.recorded_run import record_run

_NOBODY = 65534


@pytest.fixture
def unfinished(folder: Path) -> Path:
    """A run of twice as many steps that was killed an hour ago, with its ledger's write-ahead log."""
    run, killed = folder / "one", folder / "killed"
    set_max_steps(run, 2 * STEPS)
    with sqlite3.connect(run / "ledger.sqlite") as db:
        db.execute("UPDATE prompts SET reason = 'in the log' WHERE step = 1")
        db.commit()
        shutil.copytree(run, killed)  # the files of a process that is killed now
    shutil.rmtree(run)
    let_pass(killed, 3600)
    return killed


def test_a_killed_run_is_stopped_also_while_a_page_reads_it(unfinished: Path, tmp_path: Path) -> None:
    assert (unfinished / "ledger.sqlite-shm").exists()
    page = Page(unfinished.parent, tmp_path / "indexes")
    for _ in range(2):
        assert page.get("trajectories", run="killed")["total"] == 8 * STEPS
        (run,) = page.get("runs")
        assert (run["state"], time.time() - run["changed_at"] > 3500) == ("stopped", True)


def test_a_run_whose_command_lives_is_going_however_long_its_step_takes(unfinished: Path, tmp_path: Path) -> None:
    page = Page(unfinished.parent, tmp_path / "indexes")
    (unfinished / ".lock").touch()
    let_pass(unfinished, 3600)
    assert page.get("runs")[0]["state"] == "stopped"
    with file_lock(unfinished / ".lock"):
        assert page.get("runs")[0]["state"] == "going"
    assert page.get("runs")[0]["state"] == "stopped"


def test_an_evaluation_is_done_when_its_scores_are_written(folder: Path, tmp_path: Path) -> None:
    record_run(folder / "one", 0)
    set_max_steps(folder / "one", 0)
    metrics = folder / "one" / "metrics.jsonl"
    line = metrics.read_text().splitlines()[0]
    page = Page(folder, tmp_path / "indexes")
    metrics.write_text("")
    assert page.get("runs")[0]["state"] == "going"
    let_pass(folder / "one", 3600)
    assert page.get("runs")[0]["state"] == "stopped"
    metrics.write_text(line + "\n")
    assert page.get("runs")[0]["state"] == "done"


def test_a_copy_without_the_shared_memory_file_shows_the_rows_of_the_log_and_gets_no_file(
    unfinished: Path, tmp_path: Path
) -> None:
    (unfinished / "ledger.sqlite-shm").unlink()
    before = sorted(unfinished.rglob("*"))
    page = Page(unfinished.parent, tmp_path / "indexes")
    for _ in range(2):
        assert page.get("group", run="killed", group="e0-q1-0")["prompt"]["reason"] == "in the log"
    assert sorted(unfinished.rglob("*")) == before


def test_texts_are_there_once_a_checkpoint_is(folder: Path, tmp_path: Path) -> None:
    checkpoints = folder / "one" / "checkpoints"
    saved = checkpoints.rename(tmp_path / "later")
    page = Page(folder, tmp_path / "indexes")
    page.index()
    sample = page.get("trajectories", run="one", text="belarus")["rows"][0]["sample"]
    ids = page.get("sample", run="one", id=sample)
    assert ids["texts"][0].strip() == str(ids["tokens"][0])
    assert "is not there" in ids["problem"]
    saved.rename(checkpoints)
    shown = page.get("sample", run="one", id=sample)
    assert ("".join(shown["texts"]), shown["problem"]) == (ids["prompt"] + ids["response"], None)


def test_a_file_or_folder_that_may_not_be_read_hides_no_other_run() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch).chmod(0o755)
        folder = make_runs(Path(scratch))
        for name in ("closed", "closed-metrics", "closed-log"):
            shutil.copytree(folder / "one", folder / name)
        (folder / "closed-log" / "logs").mkdir()
        (folder / "closed-log" / "logs" / "rank-0.log").write_text("a line\n")
        ask_all(folder)  # imports what a plain user may not read
        for path in ("closed", "closed-metrics/metrics.jsonl", "closed-log/logs/rank-0.log"):
            (folder / path).chmod(0)
        with as_plain_user():
            page = ask_all(folder)
            states = {run["name"]: run["state"] for run in page.get("runs")}
            assert states == {"one": "done", "closed-log": "done", "closed-metrics": "unreadable"}
            answer = page.client.get("/api/live", params={"run": "closed-metrics"})
            assert (answer.status_code, "Permission denied" in answer.json()["detail"]) == (503, True)
            assert "Permission denied" in page.get("logs", run="closed-log")[0]["text"]
            unreadable = 'sluice_run_state{run="closed-metrics",state="unreadable"} 1.0'
            assert unreadable in page.client.get("/metrics").text
        (folder / "closed").chmod(0o700)


def ask_all(folder: Path) -> Page:
    page = Page(folder, folder / "indexes")
    page.client.get("/metrics")
    page.get("logs", run="closed-log")
    return page


def test_a_name_that_is_not_utf_8_is_shown(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "one", folder / os.fsdecode(b"caf\xe9"))
    page = Page(folder, tmp_path / "indexes")
    names = {run["name"] for run in page.get("runs")}
    assert names == {"one", "caf\\udce9"}
    assert page.get("live", run="caf\\udce9")["summary"]["step"] == STEPS
    assert page.client.get("/metrics").status_code == 200
    (folder / os.fsdecode(b"caf\xe9") / "ledger.sqlite").unlink()
    answer = page.client.get("/api/trajectories", params={"run": "caf\\udce9"})
    assert (answer.status_code, "is missing" in answer.json()["detail"]) == (404, True)


def test_a_link_to_a_run_of_the_folder_is_not_another_run(folder: Path, tmp_path: Path) -> None:
    (folder / "latest").symlink_to(folder / "one")
    (folder / "all").symlink_to(folder)
    elsewhere = (folder / "one").rename(tmp_path / "elsewhere")
    shutil.copytree(elsewhere, folder / "one")
    (folder / "linked").symlink_to(elsewhere)
    names = {run["name"] for run in Page(folder, tmp_path / "indexes").get("runs")}
    assert names == {"one", "linked"}


def test_a_list_of_runs_that_did_not_change_costs_little(folder: Path, tmp_path: Path) -> None:
    metrics = folder / "one" / "metrics.jsonl"
    line = read_lines(metrics)[3] | {f"reward/log/em/{i}": i / 7 for i in range(40)}
    metrics.write_text("".join(json.dumps(line | {"step": i}) + "\n" for i in range(3_000)))
    runs = Runs(folder, tmp_path / "indexes")
    first_s = seconds_of_list(runs)
    assert min(seconds_of_list(runs) for _ in range(3)) < first_s / 40
    lines = runs.get("one").lines()
    assert {id(key) for line in lines for key in line} == {id(key) for key in lines[0]}  # keys are in memory once


def seconds_of_list(runs: Runs) -> float:
    began = time.process_time()
    assert [run.summary().step for run in runs.all()] == [2_999]
    return time.process_time() - began


def let_pass(folder: Path, seconds: float) -> None:
    """Set the times of all files back."""
    for path in folder.rglob("*"):
        os.utime(path, (time.time() - seconds,) * 2)


@contextmanager
def as_plain_user() -> Iterator[None]:
    """Give up root's right to read everything within the block."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(_NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)
