"""The report is renewed while a run goes, and a live page is there when the settings ask for it."""

import io
import re
import threading
import time
from functools import partial
from pathlib import Path

import httpx
import pytest

from learner.live.view import LiveView
from learner.run.pages import MetricsPages
from learner.run.start import RunStart
from tests.fakes.waiting import wait_until
from tests.learner.report.recorded_run import record_run


@pytest.mark.parametrize(
    ("key", "age_s", "is_written"),
    [("eval/held_out/reward", 0.0, True), ("policy/lr", 0.0, False), ("eval/held_out/reward", 9.0, False)],
)
def test_report_is_written_after_an_evaluation_of_this_start(
    tmp_path: Path, key: str, age_s: float, is_written: bool
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    pages = MetricsPages(record_run(folder, 2), RunStart(folder, None), LiveView(2, file=io.StringIO()), tmp_path)
    pages.record({"step": 2, "at_s": time.time() - age_s, key: 0.5})
    pages.close()
    assert (folder / "report.html").exists() == is_written


def test_one_thread_writes_all_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writers = list[threading.Thread]()
    monkeypatch.setattr("learner.run.pages.write_report", lambda *_: writers.append(threading.current_thread()))

    def has(num: int) -> bool:
        return len(writers) == num

    folder = tmp_path / "run"
    folder.mkdir()
    pages = MetricsPages(record_run(folder, 2), RunStart(folder, None), LiveView(2, file=io.StringIO()), tmp_path)
    for step in range(3):
        pages.record({"step": step, "at_s": time.time(), "eval/held_out/reward": 0.5})
        wait_until(partial(has, step + 1), 5.0)
    pages.close()
    assert len(writers) == 3
    assert len(set(writers)) == 1
    assert not writers[0].is_alive()


def test_a_live_page_of_the_run_is_behind_the_printed_link_until_the_command_ends(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    settings = record_run(folder, 2)
    asked = settings.model_copy(update={"report": settings.report.model_copy(update={"dash": True})})
    shown = io.StringIO()
    pages = MetricsPages(asked, RunStart(folder, None), LiveView(2, file=shown), tmp_path)
    pages.open()
    match = re.search(r"http://127\.0\.0\.1:\d+/\?token=\S+", shown.getvalue())
    assert match is not None
    with httpx.Client(follow_redirects=True) as browser:
        assert browser.get(match[0]).status_code == 200
        assert [run["step"] for run in browser.get(f"{match[0].partition('?')[0]}api/runs").json()] == [2]
    assert httpx.get(f"{match[0].partition('?')[0]}api/runs").status_code == 401
    pages.close()
    with pytest.raises(httpx.ConnectError):
        httpx.get(match[0])
