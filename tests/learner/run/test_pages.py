"""The report is renewed while a run goes."""

import io
import time
from pathlib import Path

import pytest

from learner.live.view import LiveView
from learner.run.pages import MetricsPages
from learner.run.start import RunStart
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
