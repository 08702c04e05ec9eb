"""The page's index of recorded samples: words, resumes, files that were replaced, several pages with one home."""

import json
import sqlite3
import threading
from pathlib import Path

from learner.report.dash.sample_index import SampleIndex
from protocol.disk.files import replace_file
from tests.learner.report.dash.page import STEPS, Page, read_lines


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


def test_a_resume_that_repeats_the_newest_step_replaces_its_samples(page: Page, folder: Path) -> None:
    path = folder / "one" / "samples.jsonl"
    newest = [line for line in map(json.loads, path.read_text().splitlines()) if line["step"] == STEPS]
    run = page.runs.get("one")
    run.samples.update()  # the page is open during the resume
    with path.open("a") as file:
        file.write(json.dumps(newest[0] | {"start": newest[0]["start"] + 9, "response": "zebra"}) + "\n")
    run.samples.update()
    (shown,) = run.samples.of_group(newest[0]["group"])
    assert run.samples.line(shown["id"])["response"] == "zebra"
    assert page.get("trajectories", run="one", text="zebra")["total"] == 1


def test_samples_behind_damaged_lines_are_found(page: Page, folder: Path) -> None:
    path = folder / "one" / "samples.jsonl"
    line = json.loads(path.read_text().splitlines()[0])
    with path.open("ab") as file:
        file.write(b'{"step": 3, "group": "\xff\xfe"}\n[1]\n{"step": 1' + b"0" * 30 + b', "group": "g"}\n')
        file.write(json.dumps(line | {"response": "zebra"}).encode() + b"\n")
    page.runs.get("one").samples.update()
    assert page.get("trajectories", run="one", text="zebra")["total"] == 1


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


def test_a_search_without_a_letter_is_refused_and_one_before_the_index_finds_nothing(
    page: Page, folder: Path, tmp_path: Path
) -> None:
    refused = page.client.get("/api/trajectories", params={"run": "one", "text": "!!!"})
    assert (refused.status_code, refused.json()["detail"]) == (
        422,
        "text is !!!, expected a word with a letter or a digit. Leave it empty to list all trajectories.",
    )
    unread = Page(folder, tmp_path / "no-index")
    assert unread.get("trajectories", run="one", text="belarus")["total"] == 0
    assert unread.get("trajectories", run="one")["total"] == 8 * STEPS


def test_words_of_steps_that_a_resume_repeated_find_no_later_sample(page: Page, folder: Path) -> None:
    path = folder / "one" / "samples.jsonl"
    repeated = [line for line in read_lines(path) if line["step"] >= STEPS - 1]
    with path.open("a") as file:
        file.writelines(json.dumps(line | {"prompt": "quagga", "response": "zebra"}) + "\n" for line in repeated)
    page.index()
    found = page.get("trajectories", run="one", text="belarus", limit=500)["rows"]
    assert {row["step"] for row in found} == set(range(1, STEPS - 1))
    found = page.get("trajectories", run="one", text="quagga zebra", limit=500)["rows"]
    assert {row["step"] for row in found} == {STEPS - 1, STEPS}


def test_a_link_to_a_sample_never_shows_another_one(page: Page, folder: Path) -> None:
    path = folder / "one" / "samples.jsonl"
    row = page.get("trajectories", run="one", text="belarus", order="oldest")["rows"][0]
    replace_file(path, path.read_bytes().replace(b"Belarus", b"Bolivia"))
    page.index()
    assert page.get("trajectories", run="one", text="belarus")["total"] == 0
    assert page.client.get("/api/sample", params={"run": "one", "id": row["sample"]}).status_code == 404


def test_a_file_with_other_content_and_the_same_inode_is_read_from_its_beginning(page: Page, folder: Path) -> None:
    run = page.runs.get("one")
    assert run.lines()[0]["step"] == 0
    for name in ("samples.jsonl", "metrics.jsonl"):
        path = folder / "one" / name
        inode = path.stat().st_ino
        again = [line | {"response": "zebra" * 99, "policy/lr": 0.25} for line in read_lines(path) if line["step"]]
        path.write_text("".join(json.dumps(line) + "\n" for line in again))
        assert path.stat().st_ino == inode
    page.index()
    recorded = run.samples.of_group(f"e0-q{STEPS}-0")
    assert {run.samples.sample(row["id"], run.decoder())["response"][:5] for row in recorded} == {"zebra"}
    assert [(line["step"], line["policy/lr"]) for line in run.lines()] == [(i, 0.25) for i in range(1, STEPS + 1)]


def test_two_pages_with_one_home_index_each_sample_once(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    text = " ".join(f"word{i}" for i in range(100))
    lines = ({"step": i, "group": f"e0-q{i}", "sample_index": 0, "response": text} for i in range(4_000))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    pages = [SampleIndex(path, tmp_path / "indexes") for _ in range(2)]
    threads = [threading.Thread(target=page.update) for page in pages]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with sqlite3.connect(pages[0].index) as db:
        assert db.execute("SELECT COUNT(*), COUNT(DISTINCT start) FROM samples").fetchone() == (4_000, 4_000)
