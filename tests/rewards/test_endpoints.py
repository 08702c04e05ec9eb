"""`python -m rewards.endpoints`: what it shows of a run's reward endpoints, what it changes, what it refuses."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol.settings.loader import save_settings
from protocol.settings.reward_sets import REWARDS_IN_USE, read_sets
from protocol.settings.settings import Settings
from rewards.endpoints import main
from tests.fakes.http_servers import Answer, Received, ScriptedServer, free_address, scripted_server


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as scripted:
        yield scripted


def score(received: Received) -> Answer:
    """Return what a sound service answers: 1 for a query that holds its label in its answer."""
    pairs = zip(received.body["query"], received.body["labels"], strict=True)
    return Answer({"rewards": [float(f"<answer>{label}<" in query) for query, label in pairs]})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return run_of(tmp_path)


def run_of(folder: Path, **sections: Any) -> Path:
    """Return the folder of a run whose endpoint is math, of weight 2."""
    math = {"name": "math", "url": "http://127.0.0.1:1/math", "weight": 2.0}
    settings = Settings.model_validate({"rewards": {"endpoints": [math]}, **sections})
    save_settings(settings, folder / "settings.yaml")
    return folder


def newest(run: Path) -> dict[str, Any]:
    """Return the newest set: its number, how parts are combined, and (URL, weight, shadow) by name."""
    one = read_sets(run)[-1]
    endpoints = {e.name: (str(e.url), e.weight, e.shadow) for e in one.endpoints}
    return {"number": one.number, "combine": one.combine, "endpoints": endpoints}


def test_set_gives_a_known_endpoint_another_address_and_keeps_its_weight(run: Path, server: ScriptedServer) -> None:
    url = server.script_by("good", score)
    assert main([str(run), "set", f"math={url}"]) == 0
    assert newest(run) == {"number": 2, "combine": "sum", "endpoints": {"math": (url, 2.0, False)}}


def test_set_names_all_endpoints_of_the_new_set(run: Path, server: ScriptedServer) -> None:
    url = server.script_by("good", score)
    assert main([str(run), "set", "math", f"new={url}", "--combine", "mean"]) == 0
    assert newest(run)["endpoints"] == {"math": ("http://127.0.0.1:1/math", 2.0, False), "new": (url, 1.0, False)}
    assert main([str(run), "set", "new"]) == 0
    assert newest(run) == {"number": 3, "combine": "mean", "endpoints": {"new": (url, 1.0, False)}}


@pytest.mark.parametrize("section", ["rewards: ", ""])
def test_set_takes_a_settings_file(run: Path, server: ScriptedServer, section: str) -> None:
    url = server.script_by("good", score)
    endpoints = [{"name": "math", "url": url}, {"name": "new", "url": free_address(), "shadow": True}]
    rewards = json.dumps({"combine": "product", "endpoints": endpoints})
    (run / "new.yaml").write_text(f"{section}{rewards}")
    assert main([str(run), "set", str(run / "new.yaml")]) == 0
    assert newest(run)["combine"] == "product"
    assert newest(run)["endpoints"]["math"] == (url, 1.0, False)
    assert newest(run)["endpoints"]["new"][2]  # a shadow that does not answer stops nothing


def test_set_takes_an_earlier_set_again(run: Path, server: ScriptedServer) -> None:
    assert main([str(run), "set", f"other={server.script_by('good', score)}"]) == 0
    assert main([str(run), "set", "--number", "1", "--unchecked"]) == 0
    assert newest(run) == {
        "number": 3,
        "combine": "sum",
        "endpoints": {"math": ("http://127.0.0.1:1/math", 2.0, False)},
    }


def test_set_of_the_very_set_in_force_changes_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run), "set", "math"]) == 0
    assert capsys.readouterr().out == "Set 1 is this very set already: nothing is changed.\n"
    assert read_sets(run) == []


def test_set_refuses_an_endpoint_that_cannot_be_trained_with(
    run: Path, server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    url = server.script("bad", Answer({"rewards": ["high"]}))
    assert main([str(run), "set", f"math={url}"]) == 1
    told = capsys.readouterr()
    assert "math: problem  In the reply $.rewards[0] is 'high', expected a number." in told.out
    assert told.err == "Nothing is changed. Give --unchecked to set it in spite of this.\n"
    assert read_sets(run) == []
    assert main([str(run), "set", f"math={url}", "--unchecked"]) == 0


def test_set_says_which_variable_it_could_not_ask_with(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NOT_SET_HERE", raising=False)
    endpoint = {"name": "math", "url": free_address(), "headers_env": {"X-Key": "NOT_SET_HERE"}}
    (run / "new.yaml").write_text(json.dumps({"endpoints": [endpoint]}))
    assert main([str(run), "set", str(run / "new.yaml")]) == 0
    assert "math: not asked, NOT_SET_HERE is not set here. Servers need it in theirs." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["set"], "rewards: set takes FILE.yaml, NAME=URL .. or --number N."),
        (["set", "mth"], "rewards: mth is none of the run's endpoints (math). Give NAME=URL, or a file"),
        (["set", "math=ftp://x"], "settings: rewards.endpoints.0.url is wrong: URL scheme should be 'http' or 'https'"),
        (["set", "a=http://x/", "a=http://y/"], "settings: rewards.endpoints has the names ['a', 'a']."),
        (["set", "f1=http://127.0.0.1:1/"], "settings: filter.score = math is none of rewards.endpoints (f1)."),
        (["set", "--number", "9"], "rewards: --number 9 takes one of the sets 1, and no endpoints."),
        (["set", "FILE"], "rewards.clip = 5.0 cannot be changed while the run goes on (it is None). Leave it out"),
    ],
)
def test_set_refuses_what_cannot_be_in_words(
    tmp_path: Path, arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path, filter={"dynamic_sampling": True, "score": "math"})
    (run / "new.yaml").write_text("rewards: {clip: 5.0}")
    given = [str(run / "new.yaml") if argument == "FILE" else argument for argument in arguments]
    assert main([str(run), *given]) == 2
    assert text in capsys.readouterr().err
    assert read_sets(run) == []


def test_a_folder_that_is_no_runs_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "show"]) == 2
    assert capsys.readouterr().err == f"{tmp_path} has no settings.yaml. Give the folder of a run, such as runs/NAME.\n"


def test_show_tells_the_sets_and_which_server_scores_by_which(
    run: Path, server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    url = server.script_by("good", score)
    main([str(run), "set", f"new={url}"])
    servers = {"s0": {"reward_set": 2, "problem": None}, "s1": {"reward_set": 1, "problem": "KEY is not set"}}
    use = {"at": time.time(), "reward_set": 2, "servers": servers}
    (run / REWARDS_IN_USE).write_text(json.dumps(use))
    capsys.readouterr()
    assert main([str(run), "show"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("set 1  since 20")
    assert lines[0].endswith("by the settings  combine sum")
    assert lines[1] == "  math  http://127.0.0.1:1/math  weight=2.0"
    assert lines[2].startswith("set 2 (newest)  since 20")
    assert lines[3:] == [
        f"  new  {url}",
        "in force: set 2",
        "  s0 scores by set 2",
        "  s1 scores by set 1  KEY is not set",
    ]


def test_show_says_when_the_run_is_not_under_way(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(run), "show"])
    assert capsys.readouterr().out.endswith("The run has not begun: its start takes the newest set.\n")
    (run / REWARDS_IN_USE).write_text(json.dumps({"at": time.time() - 90, "reward_set": 1, "servers": {}}))
    main([str(run), "show"])
    assert "The run is not under way (last heard of 9" in capsys.readouterr().out
