"""The shelf of deploy/configs/recipes: each file loads, fits the machines that it names, passes --plan, and runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from learner.disk.model_folder import ModelSize
from learner.plan.memory import Sizes
from learner.plan.processes import Node
from learner.plan.topology import plan_topology
from learner.run.command import main
from protocol.settings.loader import load_settings
from protocol.settings.settings import Settings
from tests.fakes.tiny_models import make_tiny_model
from tests.fakes.warm_process import run_warm
from tests.learner.run.recipe_run import SHARED

ROOT = Path(__file__).resolve().parents[3]
SHELF = ROOT / "deploy" / "configs" / "recipes"
# File -> (GPUs of each node, parameters of its model): what the file's own first lines say.
MACHINES = {
    "search_ppo": ([8], 3_000_000_000),
    "search_grpo": ([8], 3_000_000_000),
    "dapo_math": ([8] * 4, 32_000_000_000),
    "dr_grpo_math": ([8], 7_000_000_000),
    "gsm8k_grpo": ([2], 500_000_000),
    "plan_7b": ([8], 7_000_000_000),
}
_H100_BYTES = 80e9


def settings_of(name: str) -> Settings:
    return load_settings(SHELF / f"{name}.yaml", [])


def test_every_file_of_the_shelf_is_tested() -> None:
    assert {path.stem for path in SHELF.glob("*.yaml")} == set(MACHINES)


@pytest.mark.parametrize("name", sorted(MACHINES))
def test_recipe_fits_the_machines_that_it_names(name: str) -> None:
    gpus, num_parameters = MACHINES[name]
    nodes = [Node(f"10.0.0.{number}", count) for number, count in enumerate(gpus)]
    plan = plan_topology(settings_of(name), Sizes(ModelSize(num_parameters)), nodes)
    used = sum(part.count * part.num_gpus for part in (plan.ranks, plan.servers))
    assert plan.backend == "nccl"
    assert used <= sum(gpus)
    assert max(plan.ranks.memory_bytes, plan.servers.memory_bytes) < 0.75 * _H100_BYTES


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", tied=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1 << 15}))
    return folder


@pytest.mark.parametrize("name", sorted(MACHINES))
def test_recipe_passes_the_plan(
    name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLUICE_HOME", str(tmp_path / "home"))
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"question {n}", "label": "1"}) + "\n" for n in range(4)))
    own = [
        "--policy.model",
        str(model),
        "--data.train",
        str(rows),
        "--data.eval",
        str(rows),
        "--run.dir",
        str(tmp_path),
    ]
    status = main(["--config", str(SHELF / f"{name}.yaml"), *own, "--plan"])
    told = capsys.readouterr()
    assert status == 0, told.err
    assert f"Run folder {tmp_path}/{settings_of(name).run.name}" in told.out


@pytest.mark.parametrize(
    ("name", "rows", "objective", "forms"),
    [
        (
            "sft",
            '{"text": "abc"}\n{"prompt": "1 + 1 =", "completion": " 2"}\n',
            "supervised fine-tuning on data.train, without rollout servers",
            "data.train has 1 row of text, 1 row of prompt + completion.",
        ),
        (
            "dpo",
            '{"prompt": "1 + 1 =", "chosen": " 2", "rejected": " 3"}\n',
            "preference learning (loss sigmoid) on data.train, without rollout servers",
            "data.train has 1 row of prompt + chosen + rejected.",
        ),
        (
            "kto",
            '{"prompt": "1 + 1 =", "completion": " 2", "label": true}\n'
            '{"prompt": "1 + 1 =", "completion": " 3", "label": false}\n',
            "preference learning from single answers (KTO) on data.train, without rollout servers",
            "1 row of prompt + completion + label true, 1 row of prompt + completion + label false.",
        ),
        (
            "reward_model",
            '{"prompt": "1 + 1 =", "chosen": " 2", "rejected": " 3", "margin": 0.5}\n',
            "reward model from pairs on data.train, without rollout servers",
            "data.train has 1 row of prompt + chosen + rejected + margin.",
        ),
    ],
)
def test_training_on_rows_is_planned_without_a_server(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    rows: str,
    objective: str,
    forms: str,
) -> None:
    monkeypatch.setenv("SLUICE_HOME", str(tmp_path / "home"))
    path = tmp_path / "rows.jsonl"
    path.write_text(rows)
    own = ["--policy.model", str(model), "--data.train", str(path), "--run.dir", str(tmp_path), "--plan"]
    assert main(["--config", str(SHELF.parent / f"{name}.yaml"), *own]) == 0
    told = capsys.readouterr().out
    assert objective in " ".join(told.split())
    assert forms in " ".join(told.split())
    assert "rollout server 0" not in told


# -- two steps of each, for real ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what recipe_run found of every file: one start of torch and DeepSpeed for all."""
    folder = tmp_path_factory.mktemp("ran")
    make_tiny_model(folder / "model", tied=True, hidden_size=32, num_layers=1)
    done = run_warm("tests.learner.run.recipe_run", str(folder), *sorted(MACHINES), timeout=280)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


@pytest.mark.stack
@pytest.mark.ranks
@pytest.mark.parametrize("name", sorted(MACHINES))
def test_two_steps_of_a_recipe_train_what_it_says(ran: dict[str, Any], name: str) -> None:
    settings, found = settings_of(name), ran[name]
    steps = [line for line in found["metrics"] if "policy/loss" in line]
    assert [line["step"] for line in steps] == [1, 2]
    assert [line["policy/num_updates"] for line in steps] == [settings.learner.num_mini_batches] * 2
    assert all(line["policy/grad_norm"] > 0.0 for line in steps)
    # Of one version, the engine's logprobs and the learner's differ by rounding to bfloat16.
    assert abs(steps[0]["policy/ratio_mean"] - 1.0) < 0.05
    assert ("critic/loss" in steps[0]) == (settings.learner.recipe == "ppo")
    assert ("policy/kl_coefficient" in steps[0]) == (settings.kl.coefficient > 0.0)
    assert all(line["length/turns"] > 1.0 for line in steps) == (settings.rollout.environment == "search")


@pytest.mark.stack
@pytest.mark.ranks
@pytest.mark.parametrize("name", sorted(MACHINES))
def test_two_steps_of_a_recipe_are_pushed_evaluated_and_pass_the_audit(ran: dict[str, Any], name: str) -> None:
    found = ran[name]
    assert sorted(found["pushed"]) == ["0", "1", "2"]
    assert len(set(found["pushed"].values())) == 3  # the weights changed with every step
    assert [line["eval/step"] for line in found["metrics"] if "eval/step" in line] == [0, 2]
    assert found["audit"] == 0


@pytest.mark.stack
@pytest.mark.ranks
@pytest.mark.parametrize("name", sorted(MACHINES))
def test_a_rank_and_a_server_that_share_a_device_take_turns(ran: dict[str, Any], name: str) -> None:
    # Before the rank loads its models, for each of two steps, and while the last checkpoint is saved.
    assert ran[name]["sleeps"] == (4 if name in SHARED else 0)
    steps = [line for line in ran[name]["metrics"] if "policy/loss" in line]
    assert all(("time/switch_s" in line) == (name in SHARED) for line in steps)
