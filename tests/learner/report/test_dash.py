"""The live page's API over run folders: figures of the files, filters, words, stories, and who may read them."""

import json
import re
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from learner.report.dash.api import TokenGate, make_dash
from learner.report.dash.exposition import metric_name
from learner.report.dash.runs import Runs
from protocol.disk.files import replace_file
from tests.learner.report.recorded_run import record_run

_ROOT = Path(__file__).resolve().parents[3]
TOKEN = "a-token-of-the-tests"
STEPS = 6


class Page:
    """A page over a folder of runs."""

    def __init__(self, folder: Path, indexes: Path) -> None:
        self.runs = Runs(folder, indexes)
        self.client = TestClient(TokenGate(make_dash(self.runs), TOKEN), headers={"authorization": f"Bearer {TOKEN}"})

    def get(self, path: str, **values: Any) -> Any:
        answer = self.client.get(f"/api/{path}", params=values)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def index(self) -> None:
        for run in self.runs.all():
            assert run.samples.update() == 1.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "runs"
    (made / "one").mkdir(parents=True)
    record_run(made / "one", STEPS)
    (made / "one" / "checkpoints" / "latest").mkdir(parents=True)
    shutil.copytree(made / "model", made / "one" / "checkpoints" / "latest" / "model")
    return made


@pytest.fixture
def page(folder: Path, tmp_path: Path) -> Iterator[Page]:
    made = Page(folder, tmp_path / "indexes")
    made.index()
    yield made
    made.client.close()


def test_list_and_live_figures_are_those_of_the_files(page: Page, folder: Path) -> None:
    (run,) = page.get("runs")
    last = json.loads((folder / "one" / "metrics.jsonl").read_text().splitlines()[-1])
    assert (run["name"], run["state"], run["step"]) == ("one", "done", STEPS)
    assert run["reward"] == last["reward/mean"]
    live = page.get("live", run="one")
    assert live["newest"] == last
    assert live["states"] == {"finished": 2 * STEPS + 1}  # one is skipped
    assert sum(each["samples"] for each in live["staleness"]) == 8 * STEPS
    assert [line["step"] for line in page.get("metrics", run="one", after=STEPS - 2)] == [STEPS - 1, STEPS]


def test_filters_leave_what_an_own_count_leaves(page: Page, folder: Path) -> None:
    with sqlite3.connect(folder / "one" / "ledger.sqlite") as db:
        all_rows = db.execute(
            'SELECT "group", sample_index, step, reward, num_model_tokens FROM trajectories'
        ).fetchall()
    wanted = {"step": 3, "min_reward": 0.5}
    expected = sorted(row[:2] for row in all_rows if row[2] == 3 and row[3] >= 0.5)
    found = page.get("trajectories", run="one", **wanted)
    assert found["total"] == len(expected)
    assert sorted((row["group"], row["sample_index"]) for row in found["rows"]) == expected
    pages = [page.get("trajectories", run="one", limit=5, offset=5 * i, order="reward_desc")["rows"] for i in range(10)]
    assert len({(row["group"], row["sample_index"]) for rows in pages for row in rows}) == len(all_rows) == 8 * STEPS
    rewards = [row["reward"] for rows in pages for row in rows]
    assert rewards == sorted(rewards, reverse=True)


def test_words_find_recorded_samples_and_a_sample_reads_as_it_was_written(page: Page, folder: Path) -> None:
    lines = [json.loads(line) for line in (folder / "one" / "samples.jsonl").read_text().splitlines()]
    assert page.get("trajectories", run="one", text="belarus")["total"] == len(lines)
    assert page.get("trajectories", run="one", text='"; DROP TABLE')["total"] == 0
    row = page.get("trajectories", run="one", text="Belarus answer", order="oldest")["rows"][0]
    shown = page.get("sample", run="one", id=row["sample"])
    (line,) = [each for each in lines if (each["group"], each["sample_index"]) == (row["group"], row["sample_index"])]
    assert shown["tokens"] == line["tokens"]
    assert len(shown["texts"]) == len(line["tokens"]) == len(shown["logprobs"])
    assert "".join(shown["texts"]) == line["prompt"] + line["response"]
    assert len({span[2] for span in shown["version_spans"]}) == 1


def test_a_resume_that_repeats_steps_replaces_their_samples(page: Page, folder: Path) -> None:
    path = folder / "one" / "samples.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    repeated = [json.loads(line) for line in lines if json.loads(line)["step"] == STEPS - 1]
    with path.open("a") as file:
        file.writelines(json.dumps(line | {"response": "zebra"}) + "\n" for line in repeated)
        file.write('{"step": 9, "cut off by a ki')
    run = page.runs.get("one")
    run.samples.update()
    steps = [step for step in range(1, STEPS + 1) for _ in run.samples.of_group(f"e0-q{step}-0")]
    assert max(steps) == STEPS - 1
    assert page.get("trajectories", run="one", text="zebra")["total"] == len(repeated)


def test_a_resume_that_the_page_did_not_see_leaves_no_line_of_the_steps_before(page: Page, folder: Path) -> None:
    run = page.runs.get("one")
    assert run.lines()
    for name in ("samples.jsonl", "metrics.jsonl"):  # cut back to step 2 and written on, past the length that was read
        lines = [json.loads(line) for line in (folder / "one" / name).read_text().splitlines()]
        again = [line if line["step"] <= 2 else line | {"response": "zebra" * 99, "policy/lr": 0.25} for line in lines]
        replace_file(folder / "one" / name, "".join(json.dumps(line) + "\n" for line in again).encode())
    run.samples.update()
    shown = [run.samples.sample(row["id"], run.decoder()) for row in run.samples.of_group(f"e0-q{STEPS}-0")]
    assert [each["response"][:5] for each in shown] == ["zebra"] * len(shown) != []
    assert [line.get("policy/lr") == 0.25 for line in run.lines()] == [line["step"] > 2 for line in run.lines()]


def test_words_of_an_earlier_versions_samples_find_their_groups(folder: Path, tmp_path: Path) -> None:
    path = folder / "one" / "samples.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    new = ("sample_index", "version_spans", "logprobs")
    old = [{name: value for name, value in line.items() if name not in new} for line in lines if line["step"] == 2]
    path.write_text("".join(json.dumps(line) + "\n" for line in old))
    page = Page(folder, tmp_path / "others")
    page.index()
    rows = page.get("trajectories", run="one", text="belarus")["rows"]
    assert {row["group"] for row in rows} == {line["group"] for line in old}
    recorded = page.get("group", run="one", group=old[0]["group"])["recorded"]
    assert len(page.get("sample", run="one", id=recorded[0]["id"])["texts"]) == len(old[0]["tokens"])


def test_a_copied_folder_that_cannot_be_written_is_shown(folder: Path, tmp_path: Path) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(folder, copied)
    before = {path: path.stat().st_mtime_ns for path in copied.rglob("*")}
    page = Page(copied, tmp_path / "others")
    page.index()
    for path in ("live", "plots", "settings", "logs", "trajectories"):
        page.get(path, run="one")
    story = page.get("group", run="one", group="e0-q2-1")
    assert story["prompt"]["state"] == "trained"
    assert len(story["trajectories"]) == 4
    assert {path: path.stat().st_mtime_ns for path in copied.rglob("*")} == before


def test_only_the_token_opens_the_page_and_a_wrong_question_is_named(page: Page) -> None:
    stranger = TestClient(page.client.app)
    assert stranger.get("/api/runs").status_code == 401
    assert stranger.get("/", headers={"authorization": "Bearer wrong"}).status_code == 401
    assert stranger.get("/", params={"token": TOKEN}, follow_redirects=False).status_code == 303
    assert stranger.get("/api/runs").status_code == 200  # by its cookie
    assert "connect-src 'self'" in page.client.get("/").text
    unknown = page.client.get("/api/live", params={"run": "../one"})
    assert (unknown.status_code, unknown.json()["detail"]) == (404, "no run is named ../one")
    assert page.client.get("/api/trajectories", params={"run": "one", "order": "reward; --"}).status_code == 422
    assert page.client.get("/api/sample", params={"run": "one", "id": 999}).status_code == 404


def test_prometheus_reads_the_newest_values_and_every_panel_of_grafana_has_a_metric(page: Page, folder: Path) -> None:
    families = {each.name: each for each in text_string_to_metric_families(page.client.get("/metrics").text)}
    last = json.loads((folder / "one" / "metrics.jsonl").read_text().splitlines()[-1])
    (reward,) = families["sluice_reward_mean"].samples
    assert (reward.labels, reward.value) == ({"run": "one"}, last["reward/mean"])
    assert {each.labels["state"]: each.value for each in families["sluice_run_state"].samples}["done"] == 1.0
    assert metric_name("eval/held_out/pass@4") == ("eval_pass_4", {"set": "held_out"})
    assert metric_name("reward/log/em/exact") == ("reward_log", {"name": "em/exact"})
    keys = re.findall(r"`([a-z]+/[\w/@]+)`", (_ROOT / "docs/look_up/metrics.md").read_text())
    known = {f"sluice_{metric_name(key)[0]}" for key in keys} | families.keys()
    panels = json.loads((_ROOT / "deploy/configs/grafana.json").read_text())["panels"]
    wanted = {target["expr"].partition("{")[0] for panel in panels for target in panel["targets"]}
    assert wanted - known == set()


def test_timeline_has_every_trajectory_and_no_two_at_once_in_a_row(page: Page) -> None:
    events = [event for event in page.get("timeline", run="one")["traceEvents"] if event["ph"] == "X"]
    of_servers = sorted((each for each in events if each["pid"] > 1), key=lambda each: each["ts"])
    assert len(of_servers) == 8 * STEPS
    ends: dict[tuple[int, int], int] = {}
    for event in of_servers:
        row = (event["pid"], event["tid"])
        assert event["ts"] >= ends.get(row, 0)
        ends[row] = event["ts"] + event["dur"]
    assert {each["name"] for each in events if each["pid"] == 1} >= {"wait", "train"}


def test_logs_are_merged_by_time_and_a_broken_ledger_is_said(page: Page, folder: Path) -> None:
    logs = folder / "one" / "logs"
    logs.mkdir()
    (logs / "rank-0.log").write_text("2026-01-01 10:00:00,100 INFO first\n2026-01-01 10:00:02,000 ERROR third\ntrace\n")
    (logs / "rank-1.log").write_text("2026-01-01 10:00:01,000 INFO second\n")
    entries = page.get("logs", run="one")
    assert [each["text"] for each in entries] == ["INFO first", "INFO second", "ERROR third\ntrace"]
    assert [each["process"] for each in page.get("logs", run="one", text="TRACE")] == ["rank-0"]
    (folder / "one" / "ledger.sqlite").write_bytes(b"not a ledger" * 100)
    assert page.client.get("/api/trajectories", params={"run": "one"}).status_code == 503
    assert "not a database" in page.get("live", run="one")["problem"]
