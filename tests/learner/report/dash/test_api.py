"""The live page's API over run folders: figures of the files, filters, words, stories, and who may read them."""

import json
import os
import re
import shutil
import sqlite3
from collections import Counter
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from learner.disk.token_books import TABLES
from learner.ledger.ledger import Ledger
from learner.live.status import STATUS, RunStatus, ServerStatus, write_status
from learner.report.dash.exposition import metric_name
from learner.report.dash.ledger_rows import LedgerRows
from tests.learner.report.dash.page import STEPS, TOKEN, Page, set_max_steps

_ROOT = Path(__file__).resolve().parents[4]
_STATUS = RunStatus(
    step=STEPS,
    policy_version=STEPS,
    window_used=12,
    window_size=16,
    ready=3,
    detail="",
    evaluation=None,
    servers={
        "rollout-0": ServerStatus(policy_version=4, running=31, waiting=2, generated_tokens=100),
        "rollout-1": None,
    },
    counts={"failed:retriever": 17},
)


def test_rates_of_servers_are_over_the_time_of_the_newest_trajectories(page: Page, folder: Path) -> None:
    with sqlite3.connect(folder / "one" / "ledger.sqlite") as db:
        (count,) = db.execute("SELECT COUNT(*) FROM trajectories").fetchone()
        # One each half second: all are within a minute of the newest.
        db.execute("UPDATE trajectories SET received_at = 1e9 + 0.5 * rowid, num_model_tokens = 10")
    rates = [each["tokens_per_s"] for each in page.get("live", run="one")["servers"]]
    assert 0.5 * count < 60.0
    assert abs(sum(rates) - 20.0) < 1e-9  # every row after the first one, over the time since then


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


def test_token_books_of_a_run_that_is_about_to_begin_are_empty(tmp_path: Path) -> None:
    assert LedgerRows(tmp_path / "ledger.sqlite", tmp_path / "copies").books()["rows"] == []


def test_token_books_add_up_to_what_the_servers_generated(page: Page, folder: Path) -> None:
    assert page.get("books", run="one")["rows"] == []
    ledger = Ledger(folder / "one" / "ledger.sqlite")
    ledger.attach("tokens.sqlite", "books", TABLES)
    ledger.close()
    with sqlite3.connect(folder / "one" / "tokens.sqlite") as db:
        for number, how in enumerate(("stopped", "failed", "failed")):
            db.execute(
                "INSERT INTO attempts VALUES ('x', ?, 1, 1, 's1-1-x', ?, ?, 0, 0, NULL)", (number, 5 + number, how)
            )
        db.execute("INSERT INTO sessions VALUES ('s1-1-x', 's1', 1, 18)")
    db.close()
    page.runs.get("one").ledger._books_due = 0.0
    found = page.get("books", run="one")
    assert found["num_generated"] == 18
    assert found["rows"] == [{"what": "failed", "num_tokens": 13}, {"what": "aborted", "num_tokens": 5}]


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
    for path, name in (("sample", "id"), ("trajectories", "step")):
        large = page.client.get(f"/api/{path}", params={"run": "one", name: 10**20})
        assert (large.status_code, large.json()["detail"]) == (
            422,
            "a number of the request is larger than any record's",
        )


def test_prometheus_reads_the_newest_values_and_every_panel_of_grafana_has_a_metric(page: Page, folder: Path) -> None:
    families = {each.name: each for each in text_string_to_metric_families(page.client.get("/metrics").text)}
    last = json.loads((folder / "one" / "metrics.jsonl").read_text().splitlines()[-1])
    (reward,) = families["sluice_reward_mean"].samples
    assert (reward.labels, reward.value) == ({"run": "one"}, last["reward/mean"])
    assert {each.labels["state"]: each.value for each in families["sluice_run_state"].samples}["done"] == 1.0
    assert metric_name("eval/held_out/pass@4") == ("eval_pass_4", {"set": "held_out"})
    assert metric_name("reward/log/em/exact") == ("reward_log", {"name": "em/exact"})
    keys = re.findall(r"`([a-z]+/[\w/@]+)`", (_ROOT / "docs/look_up/metrics.md").read_text())
    set_max_steps(folder / "one", 99)  # the run is going
    write_status(folder / "one", _STATUS)
    families |= {each.name: each for each in text_string_to_metric_families(page.client.get("/metrics").text)}
    (running,) = families["sluice_server_num_requests_running"].samples
    assert (running.labels, running.value) == ({"run": "one", "server": "rollout-0"}, 31.0)
    events = {each.labels["kind"]: each.value for each in families["sluice_events"].samples}
    assert events == {"failed:retriever": 17.0, "retried": 0.0, "skipped": 0.0}
    known = {f"sluice_{metric_name(key)[0]}" for key in keys} | {
        s.name for each in families.values() for s in each.samples
    }
    panels = json.loads((_ROOT / "deploy/configs/grafana.json").read_text())["panels"]
    wanted = {target["expr"].partition("{")[0] for panel in panels for target in panel["targets"]}
    assert wanted - known == set()
    legends = {each["expr"].partition("{")[0]: each["legendFormat"] for panel in panels for each in panel["targets"]}
    labels = {(f"sluice_{name}", label) for name, labels in map(metric_name, keys) for label in labels}
    assert [each for each in labels if each[0] in legends and each[1] not in legends[each[0]]] == []


def test_a_sample_has_the_learners_values_at_the_tokens_that_the_model_wrote(page: Page, folder: Path) -> None:
    line = json.loads((folder / "one" / "samples.jsonl").read_text().splitlines()[0])
    row = {"group": line["group"], "sample_index": line["sample_index"], "attempt": 1}
    num = sum(line["loss_mask"])
    values = {"logprobs": [-0.5] * num, "entropies": [0.25] * num, "advantages": list(map(float, range(num)))}
    places = folder / "one" / "learner_values"
    places.mkdir()
    assert page.get("sample", run="one", id=1)["learner"] is None
    other = json.dumps([{**row, **values, "sample_index": 99}])
    (places / f"step_{line['step']}.rank_1.json").write_text(other)
    (places / f"step_{line['step']}.rank_2.json").write_text("[{")  # a kill cut it off
    (places / f"step_{line['step']}.rank_0.json").write_text(json.dumps([{**row, **values}]))
    shown = page.get("sample", run="one", id=1)
    written = [i for i, is_written in enumerate(shown["loss_mask"]) if is_written]
    assert [shown["learner"]["advantages"][i] for i in written] == values["advantages"]
    assert {name: len(column) for name, column in shown["learner"].items()} == dict.fromkeys(
        values, len(shown["tokens"])
    )
    assert shown["learner"]["logprobs"][0] == 0.0  # the prompt
    (places / f"step_{line['step']}.rank_0.json").write_text(json.dumps([{**row, **values, "logprobs": [-0.5]}]))
    assert page.get("sample", run="one", id=1)["learner"] is None


def test_the_coordinators_status_is_shown_while_it_is_written(page: Page, folder: Path) -> None:
    assert page.get("live", run="one")["status"] is None
    write_status(folder / "one", _STATUS)
    status = page.get("live", run="one")["status"]
    assert (status["window_used"], status["servers"]["rollout-0"]["running"]) == (12, 31)
    path = folder / "one" / STATUS
    os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 31.0))  # its command has ended
    assert page.get("live", run="one")["status"] is None
    path.write_text('{"step": "of another version"}')
    assert page.get("live", run="one")["status"] is None


def test_timeline_has_every_trajectory_and_no_two_at_once_in_a_row(page: Page) -> None:
    events = [event for event in page.get("timeline", run="one")["traceEvents"] if event["ph"] == "X"]
    of_servers = sorted((each for each in events if "group" in each["args"]), key=lambda each: each["ts"])
    assert len(of_servers) == 8 * STEPS
    ends: dict[tuple[int, int], int] = {}
    for event in of_servers:
        row = (event["pid"], event["tid"])
        assert event["ts"] >= ends.get(row, 0)
        ends[row] = event["ts"] + event["dur"]
    assert {each["name"] for each in events if each["pid"] == 1} >= {"wait", "train"}
    names = Counter(each["name"] for each in events if each["pid"] > 1)
    recorded = page.runs.get("one").samples.after(0, 10**6)
    assert names["chat policy"] == 2 * len(recorded)
    assert names["execute_tool search"] == names["reward em"] == len(recorded) > 0


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


def test_exactly_the_most_counted_trajectories_are_not_more(page: Page, folder: Path) -> None:
    with sqlite3.connect(folder / "one" / "ledger.sqlite") as db:
        columns = [row[1] for row in db.execute("PRAGMA table_info(trajectories)")][1:]
        copied = f"SELECT ? || rowid, {', '.join(columns)} FROM trajectories LIMIT ?"  # noqa: S608  # names of columns
        for round in range(20):  # 48 at a time: to 1,000 exactly
            (there,) = db.execute("SELECT COUNT(*) FROM trajectories").fetchone()
            db.execute(f"INSERT INTO trajectories {copied}", (f"more-{round}-", min(8 * STEPS, 1_000 - there)))
        db.commit()
        found = page.get("trajectories", run="one")
        assert (found["total"], found["is_more"]) == (1_000, False)
        db.execute(f"INSERT INTO trajectories {copied}", ("last-", 1))
    found = page.get("trajectories", run="one")
    assert (found["total"], found["is_more"]) == (1_000, True)
    found = page.get("trajectories", run="one", offset=1)
    assert (found["total"], found["is_more"]) == (1_001, False)


def test_the_cookie_survives_a_link_on_another_site_and_is_of_the_browsers_port(page: Page) -> None:
    cookies = []
    for port in (9000, 9001):  # two pages behind ssh -L
        browser = TestClient(page.client.app, base_url=f"http://127.0.0.1:{port}")
        answer = browser.get("/", params={"token": TOKEN}, follow_redirects=False)
        cookies.append(answer.headers["set-cookie"])
        assert browser.get("/api/runs").status_code == 200
    assert all("samesite=lax" in cookie.lower() and "httponly" in cookie.lower() for cookie in cookies)
    assert len({cookie.partition("=")[0] for cookie in cookies}) == 2


def test_the_list_of_questions_needs_no_other_server(page: Page) -> None:
    listed = page.client.get("/docs")
    assert "cdn" not in listed.text
    assert "script" not in listed.text
    asked = page.client.get("/openapi.json").json()["paths"]
    assert len(asked) > 10
    for path in asked:
        assert f"GET {path}\n" in listed.text
    assert "min_reward" in listed.text
