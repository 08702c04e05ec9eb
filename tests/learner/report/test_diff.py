"""`sluice diff` names each planted difference of two runs, the first cause first, and none between equal runs."""

import json
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from learner.report.diff import find_differences, main
from tests.learner.report.recorded_run import record_run

STEPS = 4
Plant = Callable[[Path], None]


def _yaml(name: str, value: Any) -> Plant:
    def plant(run: Path) -> None:
        settings = yaml.safe_load((run / "settings.yaml").read_text())
        section, _, key = name.partition(".")
        settings[section][key] = value
        (run / "settings.yaml").write_text(yaml.safe_dump(settings))

    return plant


def _json(name: str, value: str, file: str = "installation.json") -> Plant:
    def plant(run: Path) -> None:
        content = json.loads((run / file).read_text())
        (run / file).write_text(json.dumps(content | {name: value}))

    return plant


def _line(file: str, step: int, change: Callable[[dict[str, Any]], Any]) -> Plant:
    """Change the first line of a step."""

    def plant(run: Path) -> None:
        lines = [json.loads(text) for text in (run / file).read_text().splitlines()]
        change(next(line for line in lines if line["step"] == step))
        (run / file).write_text("".join(json.dumps(line) + "\n" for line in lines))

    return plant


def _sql(statement: str) -> Plant:
    def plant(run: Path) -> None:
        with sqlite3.connect(run / "ledger.sqlite") as db:
            db.execute(statement)

    return plant


def _token(place: int, token: int) -> Callable[[dict[str, Any]], Any]:
    return lambda line: line["tokens"].__setitem__(place, token)


def _longer_prompt(line: dict[str, Any]) -> None:
    line["tokens"].insert(0, 7)
    line["num_prompt_tokens"] += 1


def _weights(run: Path) -> None:
    path = run / "checkpoints" / "step_000004" / "MANIFEST.json"
    path.write_text(path.read_text().replace("abc", "abd"))


def _sealed(digest: str) -> Plant:
    """Write the checkpoint's manifest with another digest of its critic, its ledger and no policy's."""

    def plant(run: Path) -> None:
        files = {"state/critic.safetensors": digest, "ledger.sqlite": digest}
        path = run / "checkpoints" / "step_000004" / "MANIFEST.json"
        path.write_text(json.dumps({"policy_digest": "abc", "files": files}))

    return plant


def _without(file: str, place: int) -> Plant:
    def plant(run: Path) -> None:
        lines = (run / file).read_text().splitlines(keepends=True)
        del lines[place]
        (run / file).write_text("".join(lines))

    return plant


_VALUES = (
    '[{"group": "e0-q2-0", "sample_index": 0, "logprobs": [-1], "entropies": [1], "advantages": [0.5]}, '
    '{"group": "e0-q2-1", "sample_index": 0, "logprobs": [], "entropies": [], "advantages": []}]'
)

PLANTED: list[tuple[str, Plant, str]] = [
    ("settings", _yaml("learner.lr", 0.5), "learner.lr is "),
    ("settings", _yaml("run.seed", 77), "run.seed is "),
    ("settings", _yaml("rollout.temperature", 0.7), "rollout.temperature is "),
    ("settings", _yaml("rollout.top_p", 0.5), "rollout.top_p is "),
    ("settings", _yaml("rollout.num_servers", 3), "rollout.num_servers is "),
    ("settings", _yaml("learner.num_ranks", 2), "learner.num_ranks is "),
    ("settings", _yaml("learner.max_staleness", 9), "learner.max_staleness is "),
    ("settings", _yaml("data.template", "x {prompt}"), "data.template is "),
    ("settings", _yaml("rewards.combine", "mean"), "rewards.combine is "),
    ("settings", _yaml("policy.dtype", "float32x"), "policy.dtype is "),
    ("installation", _json("torch", "1.0"), "torch is 2 in A, 1.0 in B"),
    ("installation", _json("vllm", "0.1"), "vllm is "),
    ("installation", _json("python", "3.10"), "python is "),
    ("installation", _json("sluice", "edited"), "sluice is "),
    ("models at the start", _json("policy.model, its weights", "c", "models.json"), "its weights is abc in A, c in B"),
    ("prompts", _sql("INSERT INTO meta VALUES ('claim:prompts', 'x')"), "the prompts of data.train differ"),
    ("prompts", _sql("INSERT INTO meta VALUES ('claim:rows', 'x')"), "labels or other columns"),
    (
        "order of the prompts",
        _sql("UPDATE prompts SET uid = 'other' WHERE position = 5"),
        "in A, other of epoch 0 in B",
    ),
    ("order of the prompts", _sql("UPDATE prompts SET epoch = 1 WHERE position = 8"), "of epoch 1 in B"),
    ("tokens of a prompt", _line("samples.jsonl", 2, _token(0, 1)), "step 2: sample 0 of e0-q2-0: token 0 is "),
    ("tokens of a prompt", _line("samples.jsonl", 1, _longer_prompt), "token 0 is "),
    ("sampled tokens", _line("samples.jsonl", 3, _token(-1, 1)), "step 3: sample 0 of e0-q3-0: token "),
    ("sampled tokens", _line("samples.jsonl", 3, lambda line: line["tokens"].pop()), ", the end in B"),
    (
        "logprobs of the sampler",
        _line("samples.jsonl", 2, lambda line: line["logprobs"].__setitem__(-1, -9.0)),
        "-9.0 in B",
    ),
    ("rewards of the same text", _line("samples.jsonl", 2, lambda line: line.update(reward=0.25)), "0.25 in B"),
    ("rewards of the same text", _line("samples.jsonl", 2, lambda line: line["reward_parts"].update(em=9)), "em is "),
    (
        "batches",
        _sql("UPDATE trajectories SET step = 4 WHERE \"group\" = 'e0-q2-1'"),
        "step 2: A alone trains sample 0",
    ),
    (
        "batches",
        _sql("UPDATE trajectories SET oldest_version = 7 WHERE step = 3 AND sample_index = 2"),
        "policy version is 2 in A, 7 in B",
    ),
    (
        "figures of the learner",
        _line("metrics.jsonl", 2, lambda line: line.update({"policy/loss": 9.0})),
        "step 2: policy/loss",
    ),
    (
        "figures of the learner",
        _line("metrics.jsonl", 3, lambda line: line.update({"policy/grad_norm": 9.0})),
        "grad_norm is ",
    ),
    (
        "services and own code",
        _sql("UPDATE meta SET value = 'x' WHERE key = 'code:loss.py'"),
        "loss.py is abc in A, x in",
    ),
    ("services and own code", _sql("INSERT INTO meta VALUES ('code:own.py', 'x')"), "none in A, own.py in B"),
    ("services and own code", _sql("UPDATE meta SET value = 'x' WHERE key = 'reward_source'"), "reward_source is "),
    ("prompts", _sql("UPDATE meta SET value = 'x' || value WHERE key = 'eval_set:own'"), "the held-out set own differ"),
    (
        "tokens of the environment",
        _line("samples.jsonl", 3, lambda line: line["tokens"].__setitem__(line["loss_mask"].index(0, 40), 1)),
        ", 1 in B",
    ),
    (
        "other facts of the same text",
        _line("samples.jsonl", 3, lambda line: line["loss_mask"].__setitem__(-1, 0)),
        "loss_mask differs",
    ),
    ("other facts of the same text", _line("samples.jsonl", 3, lambda line: line.update(finish="time")), "time in B"),
    ("other facts of the same text", _line("samples.jsonl", 3, lambda line: line.update(label="x")), "label is "),
    (
        "batches",
        _sql("UPDATE trajectories SET reward = 7 WHERE step = 3 AND sample_index = 2"),
        "reward is 0.0 in A, 7.0",
    ),
    ("batches", _sql("UPDATE trajectories SET finish = 'time' WHERE step = 3"), "end is "),
    (
        "figures of the data",
        _line("metrics.jsonl", 2, lambda line: line.update({"reward/mean": 9.0})),
        "reward/mean is ",
    ),
    (
        "learner's values of the same text",
        lambda run: (run / "learner_values" / "step_2.rank_0.json").write_text(_VALUES.replace("0.5", "9.0")),
        "step 2: sample 0 of e0-q2-0: advantages 0: 0.5 in A, 9.0 in B",
    ),
    ("held-out answers", _line("evaluations.jsonl", 4, lambda line: line.update(response="x")), "'x' in B"),
    ("held-out answers", _line("metrics.jsonl", 4, lambda line: line.update({"eval/own/reward": 9.0})), "9.0 in B"),
    ("weights", _weights, "checkpoint step_000004"),
    ("weights", _sealed("c"), "checkpoint step_000004, state/critic.safetensors"),
    (
        "batches",
        _sql("UPDATE trajectories SET newest_version = 9 WHERE step = 3 AND sample_index = 2"),
        "newest policy version is 2 in A",
    ),
    (
        "batches",
        _sql("UPDATE trajectories SET num_turns = 9 WHERE step = 3 AND sample_index = 2"),
        "turns is 2 in A, 9 in B",
    ),
    (
        "batches",
        _sql("UPDATE trajectories SET reward_parts = '[]' WHERE step = 3 AND sample_index = 2"),
        "parts of the reward is ",
    ),
    ("held-out answers", _without("evaluations.jsonl", -1), "step 4: sample 1 of b in held_out: A alone has an answer"),
    ("held-out answers", _line("evaluations.jsonl", 4, lambda line: line.update(label="x")), "'x' in B"),
]

# Planted differences of which the first is no consequence of the second: (plants, part, step).
CHAINS: list[tuple[list[Plant], str, int]] = [
    (
        [_line("samples.jsonl", 1, lambda line: line.update(reward=9)), _line("samples.jsonl", 2, _token(-1, 1))],
        "rewards of the same text",
        1,
    ),
    (
        [
            _line("metrics.jsonl", 1, lambda line: line.update({"policy/loss": 9.0})),
            _line("samples.jsonl", 2, _token(-1, 1)),
            _sql("UPDATE prompts SET uid = 'other' WHERE position = 8"),  # of step 4
        ],
        "figures of the learner",
        1,
    ),
    (
        [
            lambda run: (run / "learner_values" / "step_2.rank_0.json").write_text(_VALUES.replace("0.5", "9.0")),
            _line("samples.jsonl", 3, lambda line: line["logprobs"].__setitem__(-1, -9.0)),
            _line("evaluations.jsonl", 0, lambda line: line.update(response="x")),
        ],
        "learner's values of the same text",
        2,
    ),
    ([_weights, _line("samples.jsonl", 4, _token(-1, 1))], "sampled tokens", 4),
    ([_yaml("learner.lr", 0.5), _line("samples.jsonl", 1, _token(-1, 1))], "settings", 0),
]


META = (
    "INSERT INTO meta VALUES ('code:loss.py', 'abc'), ('reward_source', 'own'), "
    "('eval_set:own', 'abc at temperature 1, sampled by x')"
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("runs")
    a, b = folder / "a", folder / "b"
    a.mkdir()
    record_run(a, STEPS)
    (a / "installation.json").write_text('{"sluice": "1", "python": "3.11.2", "torch": "2", "vllm": "0.3"}')
    (a / "models.json").write_text('{"policy.model, its weights": "abc"}')
    (a / "checkpoints" / "step_000004").mkdir(parents=True)
    _sealed("b")(a)
    (a / "learner_values").mkdir()
    (a / "learner_values" / "step_2.rank_0.json").write_text(_VALUES)
    _sql(META)(a)
    shutil.copytree(a, b)
    return a, b


def test_equal_runs_have_no_difference(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert [(each.difference, each.unknown) for each in find_differences(*pair)] == [("", "")] * 18
    assert main([str(path) for path in pair]) == 0
    assert "No difference was found." in capsys.readouterr().out


@pytest.mark.parametrize(("part", "plant", "words"), PLANTED)
def test_each_planted_difference_is_named(
    part: str, plant: Plant, words: str, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    a, b = pair[0], shutil.copytree(pair[1], tmp_path / "b")
    plant(b)
    found = [each for each in find_differences(a, b) if each.difference]
    assert [each.part for each in found] == [part]
    assert words in found[0].difference


@pytest.mark.parametrize(("plants", "part", "step"), CHAINS)
def test_the_first_difference_of_the_earliest_step_is_where_runs_part(
    plants: list[Plant],
    part: str,
    step: int,
    pair: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = shutil.copytree(pair[1], tmp_path / "b")
    for plant in plants:
        plant(other)
    assert main([str(pair[0]), str(other)]) == 1
    at = f" of step {step}" if step else ""
    assert capsys.readouterr().out.endswith(f"The runs part at: {part}{at}.\n")


def test_time_faults_and_folders_are_no_difference(pair: tuple[Path, Path], tmp_path: Path) -> None:
    a, b = (shutil.copytree(pair[0], tmp_path / name) for name in "ab")
    for run, folder in ((a, "/home/a"), (b, "/home/b")):
        for name in ("policy.model", "critic.model", "data.train"):
            _yaml(name, f"{folder}/{name}")(run)
        _yaml("data.eval", [{"path": f"{folder}/own.jsonl"}])(run)
        _yaml("learner.loss", f"{folder}/loss.py:loss")(run)
    _sql("UPDATE trajectories SET started_at = 1, finished_at = 2, received_at = 3, server = 'x', attempt = 4")(b)
    figures = {
        "time_s": 1.0,
        "at_s": 2.0,
        "perf/mfu": 3.0,
        "eval/failed": 4,
        "eval/version_min": 5,
        "eval/version_max": 6,
    }
    _line("metrics.jsonl", 4, lambda line: line.update(figures))(b)
    assert [each for each in find_differences(a, b) if each.difference] == []
    _yaml("data.eval", [{"path": "/home/b/others.jsonl"}])(b)
    assert [each.part for each in find_differences(a, b) if each.difference] == ["settings"]


def test_steps_that_a_resume_repeated_are_not_compared(pair: tuple[Path, Path], tmp_path: Path) -> None:
    resumed = shutil.copytree(pair[1], tmp_path / "b")
    lines = [json.loads(text) for text in (resumed / "samples.jsonl").read_text().splitlines()]
    lost = [{**each, "step": 3, "tokens": [1]} for each in lines if each["step"] == 4]
    kept = [each for each in lines if each["step"] <= 3], [each for each in lines if each["step"] == 3]
    once_more = [each for each in lines if each["step"] == 2]
    (resumed / "samples.jsonl").write_text(
        "".join(json.dumps(each) + "\n" for each in [*kept[0], *lost, *once_more, *kept[1]])
    )
    assert [each for each in find_differences(pair[0], resumed) if each.difference] == []


def test_what_was_not_compared_is_said(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("metrics.jsonl", "installation.json"):
        other = shutil.copytree(pair[1], tmp_path / f"without {name}")
        (other / name).unlink()
        assert main([str(pair[0]), str(other)]) == 0
        part = "installation" if name == "installation.json" else "figures of the data, figures of the learner"
        assert f"No difference was found in the other parts. Not compared: {part}.\n" in capsys.readouterr().out
    other = shutil.copytree(pair[1], tmp_path / "b")
    _without("metrics.jsonl", 2)(other)
    found = [each.difference for each in find_differences(pair[0], other) if each.difference]
    assert found == ["step 2: A alone has figures"] * 3


@pytest.mark.parametrize("name", ["installation.json", "models.json", "checkpoints/step_000004/MANIFEST.json"])
def test_a_damaged_file_is_one_line(
    name: str, pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = shutil.copytree(pair[1], tmp_path / "b")
    for content in ("{", "[1]"):
        (other / name).write_text(content)
        assert main([str(pair[0]), str(other)]) == 2
        assert capsys.readouterr().err.startswith(f"A file of {pair[0]} or {other} was changed or cut off: ")


def test_a_run_with_fewer_steps_is_said(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shorter = shutil.copytree(pair[1], tmp_path / "b")
    lines = (shorter / "metrics.jsonl").read_text().splitlines(keepends=True)
    (shorter / "metrics.jsonl").write_text("".join(lines[:-1]))
    assert main([str(pair[0]), str(shorter)]) == 0
    assert "A ends at step 4, B at step 3: the steps that only one has were not compared." in capsys.readouterr().out


def test_a_missing_folder_and_missing_records_are_said(pair: tuple[Path, Path], tmp_path: Path) -> None:
    assert main([str(pair[0]), str(tmp_path)]) == 2
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(pair[0] / "settings.yaml", bare)
    unknown = {each.part for each in find_differences(pair[0], bare) if each.unknown}
    assert unknown >= {"installation", "prompts", "sampled tokens", "batches", "weights", "held-out answers"}


def test_learners_values_of_an_earlier_version_are_not_called_the_same(pair: tuple[Path, Path], tmp_path: Path) -> None:
    old = shutil.copytree(pair[1], tmp_path / "b")
    shutil.rmtree(old / "learner_values")
    (found,) = [each for each in find_differences(pair[0], old) if each.difference or each.unknown]
    assert (found.part, found.unknown) == ("learner's values of the same text", f"{old / 'learner_values'} is missing")
