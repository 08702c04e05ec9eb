"""The live page in Chromium, driven over a folder of recorded runs that grow while they are watched.

Needs Chromium (`apt-get install chromium`) and `uv pip install playwright`, which no lock file has: without them these
tests are skipped. `pytest tests/learner/report/dash/test_browser.py --basetemp DIR` leaves a picture of each view.
"""

import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.learner.report.dash.page import STEPS, TOKEN, make_runs, read_lines, set_max_steps

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (uv pip install playwright)")
_CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(_CHROMIUM is None, reason="there is no Chromium (apt-get install chromium)")
_LIVE_MS = 2_000  # longest time from a write to the page
_SIZES = {"wide": (1280, 900), "phone": (390, 800)}


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete run, one that is going, with a rival of other settings."""
    folder = make_runs(tmp_path_factory.mktemp("browser"))
    for name in ("going", "rival"):
        shutil.copytree(folder / "one", folder / name)
        set_max_steps(folder / name, 100)
    return folder


@pytest.fixture(scope="module")
def address(runs: Path) -> Iterator[str]:
    """The address of the real command over the runs."""
    token = runs.parent / "token"
    token.write_text(TOKEN)
    command = "import sys; from deploy.command import run_verb; sys.exit(run_verb(sys.argv[1:]))"
    options = ["dash", str(runs), "--port", "0", "--token-file", str(token)]
    home = {"SLUICE_HOME": str(runs.parent / "home")}
    process = subprocess.Popen(
        [sys.executable, "-c", command, *options], env={**os.environ, **home}, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process.stdout:
        yield next(line for line in process.stdout if "Listening" in line).split()[-1]
        process.terminate()
        process.wait()


@pytest.fixture
def open_page(chromium: Any, address: str, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Opens the page at an address behind the #; the test fails when anything was written to the console."""
    said: list[str] = []

    def open_at(view: str = "#/", size: str = "wide", scheme: str = "light") -> Any:
        width, height = _SIZES[size]
        context = chromium.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(f"{address}/?token={TOKEN}")
        page.goto(f"{address}/{view}")
        return page

    yield open_at
    for context in chromium.contexts:
        context.close()
    assert said == []


def add_step(run: Path) -> int:
    """Write the next step as the coordinator does; returns its number."""
    line = read_lines(run / "metrics.jsonl")[-1]
    line |= {"step": line["step"] + 1, "at_s": time.time()}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    return int(line["step"])


VIEWS = {
    "list": ("#/", "rival"),
    "overview": ("#/run/one", "Is it learning?"),
    "steps": ("#/run/one/steps", "policy/loss"),
    "samples": ("#/run/one/samples", "e0-q6-1"),
    "group": ("#/run/one/group/e0-q6-0", "leased to rollout-0"),
    "logs": ("#/run/one/logs", "No log of this run"),
    "settings": ("#/run/one/settings", "rollout.group_size"),
    "compare": ("#/compare/one/rival", "run.max_steps"),
}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", _SIZES)
def test_every_view_is_drawn_within_the_width(open_page: Any, tmp_path: Path, size: str, scheme: str) -> None:
    page = open_page("#/run/one/samples?text=belarus", size, scheme)
    page.get_by_text("text", exact=True).first.click()
    page.get_by_text("written by the model").wait_for()
    views = {**VIEWS, "sample": (page.evaluate("location.hash"), "written by the model")}
    for name, (view, text) in views.items():
        page.goto(f"{page.url.partition('#')[0]}{view}")
        page.get_by_text(text).first.wait_for()
        page.screenshot(path=tmp_path / f"{name}.png", full_page=True)
        assert page.evaluate("document.documentElement.scrollWidth") <= _SIZES[size][0], name
        back = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", back))) < 200) == (scheme == "dark")


def test_a_step_is_on_every_live_view_within_two_seconds(open_page: Any, runs: Path) -> None:
    texts = {"#/": "{} of 100", "#/run/going": "step {} of 100", "#/run/going/steps": "{}"}
    for view, text in texts.items():
        page = open_page(view)
        page.get_by_text(text.format(read_lines(runs / "going" / "metrics.jsonl")[-1]["step"])).first.wait_for()
        step = add_step(runs / "going")
        page.get_by_text(text.format(step), exact=view != "#/run/going").first.wait_for(timeout=_LIVE_MS)


def test_a_servers_share_is_of_as_many_trajectories_as_were_counted(open_page: Any) -> None:
    open_page("#/run/one").get_by_text(f"of newest {8 * STEPS}", exact=True).wait_for()


def test_the_list_is_renewed_under_ticks_and_keeps_ticks_and_focus(open_page: Any, runs: Path) -> None:
    page = open_page()
    for name in ("one", "going"):
        page.get_by_label(f"compare {name}", exact=True).check()
    step = add_step(runs / "going")
    page.get_by_text(f"{step} of 100").wait_for(timeout=_LIVE_MS)
    assert page.evaluate("document.activeElement.ariaLabel") == "compare going"
    assert page.get_by_label("compare one", exact=True).is_checked()
    page.get_by_role("button", name="compare").click()
    page.get_by_role("heading", name="one, going").wait_for()
    assert page.locator("canvas").count() > 3


def test_rows_do_not_change_places_while_the_list_is_open(open_page: Any, runs: Path) -> None:
    for _ in range(STEPS):
        add_step(runs / "going")
    page = open_page()
    page.get_by_role("link", name="rival").first.wait_for()
    names = page.locator("tbody td:nth-child(2)").all_inner_texts()
    assert names[0] == "going"
    page.get_by_text(f"{add_step(runs / 'rival')} of 100").wait_for(timeout=_LIVE_MS)
    assert page.locator("tbody td:nth-child(2)").all_inner_texts() == names


def test_a_slow_click_opens_a_run_and_a_right_button_stops_no_renewal(open_page: Any, runs: Path) -> None:
    page = open_page()
    page.get_by_role("link", name="rival").last.hover()
    page.mouse.down()
    page.wait_for_timeout(2_500)
    page.mouse.up()
    page.get_by_text("Is it learning?").wait_for()
    page.mouse.down(button="right")
    page.get_by_text(f"step {add_step(runs / 'rival')} of 100").wait_for(timeout=_LIVE_MS)
    page.mouse.up(button="right")


def test_opened_events_stay_open(open_page: Any, runs: Path) -> None:
    with sqlite3.connect(runs / "going" / "ledger.sqlite") as db:
        db.execute("INSERT INTO events VALUES (?, 'server_lost', 'rollout-1 answers no more')", (time.time(),))
    page = open_page("#/run/going")
    page.get_by_text("newest events").click()
    lost = page.get_by_role("cell", name="rollout-1 answers no more")  # it is an alarm too
    lost.wait_for()
    page.wait_for_timeout(2_500)
    assert lost.is_visible()


def test_filters_are_shown_and_kept(open_page: Any) -> None:
    page = open_page("#/run/one")
    page.get_by_role("cell", name="rollout-0").click()
    server = page.get_by_label("server")
    assert server.input_value() == "rollout-0"
    page.get_by_label("step", exact=True).fill("3")
    page.keyboard.press("Enter")
    page.get_by_text("1 to 8 of 8").wait_for()
    assert "server=rollout-0" in page.url
    page.get_by_label("ended by").select_option("length")
    page.get_by_text("no trajectory has all this").wait_for()
    page.get_by_role("button", name="clear").click()
    page.get_by_text(f"1 to {8 * STEPS} of {8 * STEPS}").wait_for()


def test_a_search_without_a_letter_is_explained_next_to_the_filters(chromium: Any, address: str) -> None:
    page = chromium.new_page()
    page.goto(f"{address}/?token={TOKEN}")
    page.goto(f"{address}/#/run/one/samples?text=!!!")
    page.get_by_text("text is !!!, expected a word").wait_for()
    page.get_by_label("words").fill("belarus")
    page.keyboard.press("Enter")
    page.get_by_text("1 to ").wait_for()
    page.close()


def test_a_page_whose_command_has_ended_says_so_and_goes_on_when_it_is_back(chromium: Any, address: str) -> None:
    page = chromium.new_page()
    page.goto(f"{address}/?token={TOKEN}")
    page.get_by_text("Tick two runs").wait_for()
    page.route("**/api/**", lambda route: route.abort())
    page.get_by_role("alert").filter(has_text="has sluice dash ended?").wait_for()
    page.unroute_all(behavior="ignoreErrors")
    page.get_by_role("alert").filter(has_text="ended?").wait_for(state="detached")
    assert page.get_by_text("rival").is_visible()
    page.close()


def test_one_poll_is_under_way_at_a_time_however_often_a_view_is_left(open_page: Any) -> None:
    page = open_page("#/run/one")
    page.get_by_text("Is it learning?").wait_for()
    at_once, most, num = 0, 0, 0

    def slow(route: Any) -> None:
        nonlocal at_once, most, num
        at_once, num = at_once + 1, num + 1
        most = max(most, at_once)
        page.wait_for_timeout(300)
        at_once -= 1
        route.continue_()

    page.route("**/api/live*", slow)
    for _ in range(6):
        page.evaluate("location.hash = '#/run/one/settings'; setTimeout(() => { location.hash = '#/run/one'; }, 10)")
        page.wait_for_timeout(60)
    page.wait_for_timeout(2_000)
    before = num
    page.wait_for_timeout(4_000)
    assert num - before <= 4
    page.unroute_all(behavior="ignoreErrors")


def test_keys_alone_reach_a_sample_and_its_neighbours(open_page: Any) -> None:
    page = open_page()
    page.get_by_role("link", name="one").first.wait_for()
    for _ in range(30):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.innerText") == "one":
            break
    page.keyboard.press("Enter")
    page.get_by_text("Is it learning?").wait_for()
    page.evaluate("location.hash = '#/run/one/samples'")
    page.get_by_text("1 to ").wait_for()
    page.keyboard.press("/")
    page.keyboard.type("belarus")
    page.keyboard.press("Enter")
    page.wait_for_url("**text=belarus*")
    page.get_by_text("1 to ").wait_for()
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.tagName") == "TR":
            break
    page.keyboard.press("Enter")
    page.get_by_text("written by the model").wait_for()
    first = page.url
    page.keyboard.press("ArrowLeft")
    page.wait_for_function("first => location.href !== first", arg=first)
    page.keyboard.press("ArrowRight")
    page.wait_for_url(first)
    page.get_by_text("written by the model").wait_for()
    assert page.locator(".token").first.get_attribute("title").startswith("token 0: id ")
    page.get_by_label("colour of the tokens").select_option("version")
    page.locator(".tag", has_text="version").first.wait_for()


def test_tokens_are_coloured_by_the_learners_values_where_they_are_known(open_page: Any, runs: Path) -> None:
    line = read_lines(runs / "one" / "samples.jsonl")[0]
    num = sum(line["loss_mask"])
    values = {"logprobs": [-0.5] * num, "entropies": [1.0] * num, "advantages": [-2.0] + [0.0] * (num - 1)}
    places = runs / "one" / "learner_values"
    places.mkdir()
    row = {"group": line["group"], "sample_index": line["sample_index"], **values}
    (places / f"step_{line['step']}.rank_0.json").write_text(json.dumps([row]))
    page = open_page("#/run/one/sample/1")
    first = page.locator(".token").nth(line["loss_mask"].index(1))
    for name, tag in (("advantage", "worse"), ("entropy", "3 nats"), ("gap", "0.2 nats")):
        page.get_by_label("colour of the tokens").select_option(name)
        page.locator(".tag", has_text=tag).wait_for()
        assert "--bad" in first.get_attribute("style")
    assert "learner's logprob -0.5, entropy 1, advantage -2" in first.get_attribute("title")
    page = open_page("#/run/one/sample/2")
    page.get_by_label("colour of the tokens").wait_for()
    assert page.locator("option", has_text="advantage").count() == 0


def test_the_link_works_on_another_site(chromium: Any, address: str, tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(f"<a href='{address}/?token={TOKEN}'>my runs</a>")
    handler = partial(SimpleHTTPRequestHandler, directory=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as other:
        Thread(target=other.serve_forever, daemon=True).start()
        page = chromium.new_page()
        page.goto(f"http://localhost:{other.server_port}/")
        page.get_by_text("my runs").click()
        page.get_by_text("Tick two runs").wait_for()
        page.close()
        other.shutdown()
