"""What a run's command does when a process dies before the run trains, or a node is away when the command is given."""

import json
import shlex
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from learner.checkpoint.manifest import Checkpoint, RefusedCheckpointError
from learner.run import attempt, driver
from learner.run.start import RunStart
from protocol.errors import NeighbourError, OperatorError, SettingsError
from protocol.settings.loader import load_settings, save_settings
from protocol.settings.settings import Settings


@pytest.mark.parametrize(
    ("saved", "step", "loss"),
    [
        ([2, 4], 7, "Lost: steps 5 to 7. A resume continues after step 4."),
        ([2, 4], 4, "dropped. A resume continues after step 4."),
        ([], 0, "dropped. A resume continues after step 2."),
    ],
)
def test_a_stop_that_dropped_steps_says_which(tmp_path: Path, saved: list[int], step: int, loss: str) -> None:
    for number in saved:
        (tmp_path / "checkpoints" / f"step_{number:06d}").mkdir(parents=True)
    resumed = Checkpoint(tmp_path / "checkpoints" / "step_000002", 2, 2, "a", "model-1")
    assert attempt.describe_loss(RunStart(tmp_path, resumed), step, 20.0).endswith(loss)


class Attempt:
    """Dies in its launch as often as it is told to."""

    step = 0
    deaths = 0
    launched = 0
    ending: list[Exception] = []  # noqa: RUF012  # errors of the first watches, in order
    detached = 0

    def __init__(self, context: Any, start: RunStart) -> None:
        self.context = context

    def launch(self) -> None:
        Attempt.launched += 1
        if Attempt.launched <= Attempt.deaths:
            raise NeighbourError("learner rank 0", "died")

    def watch(self) -> str:
        if Attempt.ending:
            raise Attempt.ending.pop(0)
        return "Done."

    def detach_servers(self) -> None:
        Attempt.detached += 1

    def end(self) -> None:
        pass


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(attempt, "RunAttempt", Attempt)
    monkeypatch.setattr(driver, "describe_cluster_loss", lambda cluster: None)
    monkeypatch.setattr(driver, "_restart", lambda context, start, error: start)
    monkeypatch.setattr(Attempt, "launched", 0)
    monkeypatch.setattr(Attempt, "detached", 0)
    settings = SimpleNamespace(run=SimpleNamespace(max_restarts=3))
    context: Any = SimpleNamespace(settings=settings, copies=None, cluster=None)

    def run_from(checkpoint: Any, deaths: int, *ending: Exception) -> tuple[str, int]:
        Attempt.deaths, Attempt.ending = deaths, list(ending)
        return driver._run_attempts(RunStart(Path("runs/a"), checkpoint), context, driver._Progress())

    return run_from


def test_resumed_run_survives_one_death_while_it_starts(run: Any) -> None:
    assert run(SimpleNamespace(step=5), 1) == ("Done.", 5)
    assert Attempt.launched == 2


def test_resumed_run_that_cannot_start_ends_at_the_second_death(run: Any) -> None:
    with pytest.raises(NeighbourError, match="learner rank 0: died"):
        run(SimpleNamespace(step=5), 9)
    assert Attempt.launched == 2


def test_new_run_ends_at_the_first_death(run: Any) -> None:
    with pytest.raises(NeighbourError, match="learner rank 0: died"):
        run(None, 9)
    assert Attempt.launched == 1


def test_error_of_a_users_function_that_repeats_ends_the_run(run: Any) -> None:
    first, other = (NeighbourError("rank 0", f"KeyError: 'x' (loss.py:{line})", f"loss.py:{line}") for line in (3, 9))
    with pytest.raises(NeighbourError, match=r"loss\.py:9"):
        run(None, 0, first, other, other, other)
    assert Attempt.launched == 3
    Attempt.launched = 0
    assert run(None, 0, first, other) == ("Done.", 0)


def test_second_checkpoint_that_is_refused_ends_the_run_with_the_others_in_place(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    aside: list[object] = []
    monkeypatch.setattr(driver, "set_refused_aside", lambda start, error: aside.append(start))
    refused = [RefusedCheckpointError(f"step {step}") for step in (9, 6, 3)]
    with pytest.raises(RefusedCheckpointError, match="step 6"):
        run(SimpleNamespace(step=9), 0, *refused)
    assert (Attempt.launched, len(aside), Attempt.detached) == (2, 1, 1)


def test_result_has_the_first_and_the_last_score_and_the_newest_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "sluice_command", lambda: "sluice")  # it is on PATH
    save_settings(Settings(), tmp_path / "settings.yaml")
    scores = [
        {"step": 2, "eval/step": 0, "eval/held_out/reward": 0.25},
        {"step": 4, "eval/step": 4, "eval/held_out/reward": 0.75},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in scores))
    assert driver.describe_result(tmp_path) == ["Score, sampled at temperature 1: 0.250 -> 0.750"]
    (tmp_path / "checkpoints" / "latest" / "model").mkdir(parents=True)
    assert driver.describe_result(tmp_path)[1:] == [
        f"Model: {tmp_path}/checkpoints/latest/model",
        "Next:",
        *(f"  sluice {verb}" for verb in (f"audit {tmp_path}", f"eval {tmp_path} SET", f"report {tmp_path} OTHER_RUN")),
    ]


def test_commands_after_a_run_are_complete_in_a_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my runs" / "a"
    (model := folder / "checkpoints" / "latest" / "model").mkdir(parents=True)
    save_settings(load_settings(None, ["--objective", "reward_model"]), folder / "settings.yaml")
    monkeypatch.setenv("PATH", "/nowhere")
    _, next_line, *lines = driver.describe_result(folder)
    assert next_line == "Next:"
    sluice = str(Path(sys.executable).with_name("sluice").absolute())
    assert [[str(Path(word).absolute()), *rest] for word, *rest in map(shlex.split, lines)] == [
        [sluice, "audit", str(folder)],
        [sluice, "serve-reward", "--scorer", "reward_model", "--model", str(model)],
        [sluice, "report", str(folder), "OTHER_RUN"],
    ]


class View:
    def __init__(self) -> None:
        self.phases: list[str] = []

    def show_phase(self, text: str) -> None:
        self.phases.append(text)


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Waits for nodes: plan says how often they cannot hold the run before they can."""
    monkeypatch.setattr(attempt, "_POLL_S", 0.01)
    monkeypatch.setattr(attempt, "check_cluster", lambda cluster: None)
    monkeypatch.setattr("ray.nodes", list)

    def awaiting(refusals: int, stop: threading.Event) -> tuple[Any, list[str]]:
        view, left = View(), [SettingsError("settings: do not fit")] * refusals

        def plan(*_: object) -> str:
            if left:
                raise left.pop()
            return "a plan"

        monkeypatch.setattr(attempt, "plan_topology", plan)
        context: Any = SimpleNamespace(settings=None, sizes=None, cluster=None, view=view, stop=stop)
        return attempt.await_plan(context), view.phases

    return awaiting


def test_node_that_comes_back_is_waited_for(nodes: Any) -> None:
    assert nodes(2, threading.Event()) == ("a plan", ["waiting for nodes: settings: do not fit"] * 2)


def test_ctrl_c_ends_the_wait_for_a_node(nodes: Any) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(attempt.StoppedAtStart):
        nodes(2, stop)


def test_node_that_stays_away_is_named(nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt, "_NODES_S", 0.05)
    with pytest.raises(OperatorError, match=r"The cluster's nodes cannot hold the run any more\. settings: do not fit"):
        nodes(1000, threading.Event())


def test_restart_with_a_tokenizer_that_was_changed_meanwhile_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path / "model", tmp_path / "step_4" / "model"):
        folder.mkdir(parents=True)
        (folder / "chat_template.jinja").write_text(str(folder))
    start = RunStart(tmp_path / "run", Checkpoint(tmp_path / "step_4", 4, 4, "a", ""))
    context: Any = SimpleNamespace(model=tmp_path / "model")
    with pytest.raises(SettingsError, match=r"chat_template\.jinja is not the file that .*step_4 was trained with"):
        driver._restart(context, start, NeighbourError("learner rank 0", "died"))
