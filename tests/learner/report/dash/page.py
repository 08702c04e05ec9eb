"""A live page over a folder of recorded runs, asked over its API."""

import json
import shutil
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from learner.report.dash.api import TokenGate, make_dash
from learner.report.dash.runs import Runs
from protocol.settings.loader import load_saved_settings, save_settings
from tests.learner.report.recorded_run import record_run

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
            run.samples.update()
            assert run.samples.progress() == 1.0


def make_runs(parent: Path) -> Path:
    """Make a folder of one complete run, `one`, with a checkpoint's tokenizer; returns the folder."""
    made = parent / "runs"
    (made / "one").mkdir(parents=True)
    record_run(made / "one", STEPS)
    (made / "one" / "checkpoints" / "latest").mkdir(parents=True)
    shutil.copytree(made / "model", made / "one" / "checkpoints" / "latest" / "model")
    return made


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the JSON lines of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def set_max_steps(run: Path, number: int) -> None:
    """Change run.max_steps in a run's settings."""
    settings = load_saved_settings(run / "settings.yaml")
    changed = settings.model_copy(update={"run": settings.run.model_copy(update={"max_steps": number})})
    save_settings(changed, run / "settings.yaml")
