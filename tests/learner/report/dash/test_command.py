"""`sluice dash` as a command: its demo, and its end by Ctrl-C."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.fakes.waiting import wait_until

_COMMAND = "import sys; from deploy.command import run_verb; sys.exit(run_verb(sys.argv[1:]))"


@pytest.fixture
def demo(tmp_path: Path) -> "Iterator[subprocess.Popen[str]]":
    environment = {**os.environ, "SLUICE_HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", _COMMAND, "dash", "--demo", "--port", "0"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


def test_the_demo_shows_a_recorded_quick_start_until_ctrl_c(demo: "subprocess.Popen[str]", tmp_path: Path) -> None:
    assert demo.stdout is not None
    link = next(line for line in demo.stdout if "Open " in line).split()[-1]
    with httpx.Client(base_url=link.partition("?")[0], follow_redirects=True) as browser:
        assert browser.get(link).status_code == 200
        (run,) = browser.get("api/runs").json()
        assert (run["name"], run["state"], run["step"]) == ("quickstart", "done", run["max_steps"])
        of_run = {"run": "quickstart"}
        words = {**of_run, "text": "search"}
        wait_until(lambda: browser.get("api/trajectories", params=words).json()["total"] > 0)
        row = browser.get("api/trajectories", params=words).json()["rows"][0]
        sample = browser.get("api/sample", params={**of_run, "id": row["sample"]}).json()
        assert "".join(sample["texts"]) == sample["prompt"] + sample["response"]
        of_step = browser.get("api/trajectories", params={**of_run, "step": 1}).json()["rows"]
        ids = [row["sample"] for row in of_step if row["sample"] is not None]
        samples = [browser.get("api/sample", params={**of_run, "id": id}).json() for id in ids]
        assert any(sample["learner"] for sample in samples)
        held_out = [line.get("eval/held_out/reward") for line in browser.get("api/metrics", params=of_run).json()]
        assert held_out[0] < 0.3 < 0.8 < held_out[-1]
    assert list(tmp_path.glob("sluice-demo-*/quickstart"))
    demo.send_signal(signal.SIGINT)
    demo.communicate(timeout=30)
    assert demo.returncode == 130
    assert list(tmp_path.glob("sluice-demo-*")) == []
