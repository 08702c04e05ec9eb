"""The shelf of deploy/configs/recipes: each file loads, fits the machines that it names, and passes --plan."""

import json
from pathlib import Path

import pytest

from learner.disk.model_size import ModelSize
from learner.run.command import main
from learner.run.rank_memory import Sizes
from learner.run.topology import Node, plan_topology
from protocol.settings.algorithm.names import ADVANTAGES_OF_TOKENS
from protocol.settings.loader import load_settings
from protocol.settings.settings import Settings
from tests.fakes.tiny_models import make_tiny_model

SHELF = Path(__file__).resolve().parents[3] / "deploy" / "configs" / "recipes"
# File -> (GPUs of each node, parameters of its model): what the file's own first lines say.
MACHINES = {
    "search_ppo": ([8], 3_000_000_000),
    "search_grpo": ([8], 3_000_000_000),
    "dapo_math": ([8] * 4, 32_000_000_000),
    "dr_grpo_math": ([8], 7_000_000_000),
    "gsm8k_grpo": ([2], 500_000_000),
    "plan_7b": ([8], 7_000_000_000),
    "plan_70b": ([8] * 8, 70_000_000_000),
}
_H100_BYTES = 80e9


def settings_of(name: str) -> Settings:
    return load_settings(SHELF / f"{name}.yaml", [])


def needs_other_models(settings: Settings) -> bool:
    return bool(ADVANTAGES_OF_TOKENS.get(settings.learner.advantage or "") or settings.kl.coefficient)


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
    if status and needs_other_models(settings_of(name)):  # until ranks hold them
        assert "which no rank holds yet" in told.err
    else:
        assert status == 0, told.err
        assert f"run folder {tmp_path}/{settings_of(name).run.name}" in told.out
