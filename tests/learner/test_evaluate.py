"""The command's own part: what it asks of a run, and the scores that it reads back. A real one is in tests/flow."""

import json
from argparse import Namespace
from pathlib import Path

import pytest
from rich.console import Console

from learner import evaluate
from learner.evaluate import newest_evaluation, options_of, scores_of, scores_table, settings_of_run
from learner.ledger.ledger import Ledger
from learner.plan.needs import needs_prompts, needs_rollouts
from protocol.settings.loader import load_settings, save_settings


def test_an_evaluation_alone_is_a_run_of_no_steps_prompts_or_checkpoints() -> None:
    given = Namespace(
        model="m", sets=["a.jsonl", "b set.jsonl", "aime=c.parquet"], samples=4, num_prompts=9, dir="runs"
    )
    settings = load_settings(None, options_of(given, "mine"))
    assert (settings.run.name, settings.run.max_steps, settings.data.train) == ("mine", 0, "")
    assert settings.data.eval == "a.jsonl"
    assert [(one.name, one.data) for one in settings.eval.sets] == [("b-set", "b set.jsonl"), ("aime", "c.parquet")]
    assert (settings.eval.samples, settings.eval.num_prompts) == (4, 9)
    assert (needs_prompts(settings), needs_rollouts(settings)) == (False, True)


def test_settings_of_a_training_run_may_be_given_for_an_evaluation(tmp_path: Path) -> None:
    config = tmp_path / "trained.yaml"
    config.write_text("objective: sft\nrun: {max_epochs: 2}\neval: {before: false}\nlearner: {lr: 1.0e-5}\n")
    given = Namespace(model="m", sets=["a.jsonl"], samples=1, num_prompts=9, dir="runs")
    settings = load_settings(config, options_of(given, "mine"))
    assert (settings.run.max_steps, settings.run.max_epochs, settings.eval.before) == (0, None, True)
    assert needs_rollouts(settings)


def test_every_set_that_is_given_a_name_has_it_the_first_one_too() -> None:
    given = Namespace(model="m", sets=["math=a.jsonl", "b.jsonl"], samples=1, num_prompts=9, dir="runs")
    settings = load_settings(None, options_of(given, "mine"))
    assert settings.data.eval is None
    assert [(one.name, one.data) for one in settings.eval.sets] == [("math", "a.jsonl"), ("b", "b.jsonl")]


def test_equals_sign_inside_a_path_names_no_set() -> None:
    given = Namespace(model="m", sets=["/d/x=1/a.jsonl", "./x=2/b.jsonl"], samples=1, num_prompts=9, dir="runs")
    settings = load_settings(None, options_of(given, "mine"))
    assert settings.data.eval == "/d/x=1/a.jsonl"
    assert [(one.name, one.data) for one in settings.eval.sets] == [("b", "./x=2/b.jsonl")]


def test_model_of_a_run_is_that_of_its_newest_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "latest" / "model").mkdir(parents=True)
    given = Namespace(model=str(tmp_path), sets=["a.jsonl"], samples=1, num_prompts=9, dir="runs")
    settings = load_settings(None, options_of(given, "mine"))
    assert settings.policy.model == str(tmp_path / "checkpoints" / "latest" / "model")


@pytest.mark.parametrize("place", ["", "checkpoints", "checkpoints/latest", "checkpoints/latest/model"])
@pytest.mark.parametrize(("objective", "environment"), [("policy_gradient", "search"), ("sft", "single_turn")])
def test_a_run_or_checkpoint_is_scored_with_the_runs_settings_unless_others_are_given(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], objective: str, environment: str, place: str
) -> None:
    run = tmp_path / "run"
    (run / "checkpoints" / "latest" / "model").mkdir(parents=True)
    given = tmp_path / "a.yaml"
    own = "rollout: {environment: search}" if objective == "policy_gradient" else "learner: {lr: 1.0e-5}"
    given.write_text(f"objective: {objective}\npolicy: {{dtype: float32}}\n{own}\n")
    save_settings(load_settings(given, []), run / "settings.yaml")
    options = Namespace(model=str(run / place), sets=["a.jsonl"], samples=1, num_prompts=9, dir="runs", config=None)
    taken = settings_of_run(options, [])
    config, rest = (Path(taken[1]), taken[2:]) if taken[0] == "--config" else (None, taken)
    settings = load_settings(config, [*rest, *options_of(options, "mine")])
    assert (settings.rollout.environment, settings.objective) == (environment, "policy_gradient")
    assert (settings.policy.dtype, settings.policy.model) == ("float32", str(run / "checkpoints" / "latest" / "model"))
    assert ("The settings are those of the run" in capfd.readouterr().err) is (objective == "policy_gradient")
    options.config = "b.yaml"
    assert settings_of_run(options, []) == ["--config", "b.yaml"]


def test_another_model_folder_is_scored_with_the_settings_of_the_command_alone(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    save_settings(load_settings(None, []), tmp_path / "settings.yaml")
    for place in (tmp_path, tmp_path / "model", Path("owner/name")):
        assert settings_of_run(Namespace(model=str(place), config=None), []) == []


def test_a_run_of_rows_gives_the_form_of_its_weights_unless_the_command_does(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "latest" / "model").mkdir(parents=True)
    save_settings(load_settings(None, ["--objective", "sft", "--policy.dtype", "float32"]), tmp_path / "settings.yaml")
    options = Namespace(model=str(tmp_path), config=None)
    trust = ["--policy.trust_remote_code", "false"]
    assert settings_of_run(options, []) == ["--policy.dtype", "float32", *trust]
    assert settings_of_run(options, ["--policy.dtype=bfloat16"]) == trust


def test_scores_by_another_scorer_than_the_runs_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trained" / "checkpoints" / "latest" / "model").mkdir(parents=True)
    (tmp_path / "mine").mkdir()
    line = {"step": 0, "eval/step": 0, "eval/held_out/reward": 0.5}
    (tmp_path / "mine" / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    code = {"The scorer of the cluster": "1", "/a/env.py": "2"}
    for name, digests in (("trained", code | {"The search index": "3"}), ("mine", code)):
        ledger = Ledger(tmp_path / name / "ledger.sqlite")
        ledger.begin_code(digests)
        ledger.close()
    monkeypatch.setattr(evaluate, "run", lambda arguments: 0)  # the evaluation has ended
    command = [str(tmp_path / "trained"), "a.jsonl", "--name", "mine", "--dir", str(tmp_path)]
    assert evaluate.main(command) == 0
    assert capsys.readouterr().err == ""
    ledger = Ledger(tmp_path / "mine" / "ledger.sqlite")
    ledger.begin_code({"The scorer of the cluster": "9"})
    ledger.close()
    assert evaluate.main(command) == 0
    assert capsys.readouterr().err == (
        f"The scorer of the cluster is not what it was in {tmp_path / 'trained'}: compare no scores with that run's.\n"
    )


def test_scores_are_read_by_set_and_shown_with_their_errors(tmp_path: Path) -> None:
    line = {"step": 0, "eval/step": 0, "eval/a/reward": 0.5, "eval/a/reward_error": 0.125, "eval/b/x/reward": 1.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    scores = scores_of(newest_evaluation(tmp_path))
    assert scores == {"a": {"reward": 0.5, "reward_error": 0.125}, "b": {"x/reward": 1.0}}
    console = Console(width=80)
    with console.capture() as shown:
        console.print(scores_table(scores))
    assert "0.5000 ± 0.1250" in shown.get()
    assert "reward_error" not in shown.get()


def test_a_run_that_was_stopped_has_no_scores(tmp_path: Path) -> None:
    assert scores_of(newest_evaluation(tmp_path)) == {}


def test_prompts_that_failed_are_said_with_the_most_frequent_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    line = {"step": 0, "eval/step": 0, "eval/failed": 2, "eval/held_out/reward": 0.5, "eval/held_out/num_prompts": 6}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    ledger = Ledger(folder / "ledger.sqlite")
    for attempt, boundary in enumerate(("engine", "reward:mine", "reward:mine")):
        ledger.add_failure("eval-0-a", 0, attempt, "s1", boundary, "HTTP 500")
    ledger.close()
    monkeypatch.setattr(evaluate, "run", lambda arguments: 0)  # the run has ended
    assert evaluate.main(["m", "a.jsonl", "--name", "mine", "--dir", str(tmp_path), "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == {"held_out": {"reward": 0.5, "num_prompts": 6}}
    assert said.err == "2 prompts failed and are in no score. Most frequent failure: reward:mine: HTTP 500\n"
