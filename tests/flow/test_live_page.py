"""A page that comes with a run, in Chromium: what a real run writes is on it, and so is the death of a server.

Skipped without playwright (`uv pip install playwright`) and Chromium, as in CI.
"""

import shutil
import time
from typing import Any

import pytest

from tests.flow.flow_cluster import FlowCluster, Run
from tests.flow.user_run import Bring

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (uv pip install playwright)")
_CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.stack,
    pytest.mark.timeout(600),
    pytest.mark.skipif(_CHROMIUM is None, reason="there is no Chromium (apt-get install chromium)"),
]


def test_steps_and_a_killed_server_of_a_real_run_are_on_its_page(cluster: FlowCluster, slow_user: Bring) -> None:
    options = {"run.max_steps": 60, "learner.max_staleness": 0, "report.dash": True}
    left = slow_user.left("watched")
    with cluster.running(*slow_user.options("watched", options)) as run, sync_api.sync_playwright() as playwright:
        page, said = playwright.chromium.launch(executable_path=_CHROMIUM, args=["--no-sandbox"]).new_page(), []
        page.on("console", lambda message: said.append(f"{message.text} {message.location}"))
        page.goto(link_of(run))
        page.get_by_role("link", name="watched").first.click()
        page.get_by_text("going").wait_for()
        for step in (2, 4):
            run.wait_until(lambda step=step: left.last_step >= step)
            assert step_on(page) >= step
        (server,) = cluster.actors("RolloutServer")
        server.kill()
        page.get_by_text("sluice-rollout-0").locator("visible=true").first.wait_for()
        page.locator("li.worse", has_text="sluice-rollout-0").wait_for(timeout=60_000)
        run.wait_until(lambda: left.last_step >= 8)
        assert step_on(page) >= 8
        page.get_by_role("link", name="samples").click()
        page.get_by_text("1 to 50 of").wait_for()
        page.locator("tr", has_text="text").nth(1).click()
        page.get_by_text("written by the model").wait_for()
        assert said == []
        assert run.finished().returncode == 0


def link_of(run: Run) -> str:
    """Return the link that the run prints."""
    assert run.process.stdout is not None
    return next(line for line in run.process.stdout if "Live page:" in line).split("Live page: ")[1].split()[0]


def step_on(page: Any) -> int:
    """Return the step that the page shows two seconds from now."""
    time.sleep(2)
    text: str = page.locator(".card", has_text="progress").inner_text()
    return int(text.partition(", step ")[2].split()[0])
