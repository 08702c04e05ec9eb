"""deploy/configs/plans: each file's first lines hold the table that `--plan` draws for its cluster's description."""

import json
from pathlib import Path

import pytest

from learner.plan.described import described_nodes, described_size, read_description
from learner.plan.memory import Sizes
from learner.plan.processes import Topology
from learner.plan.shown import node_rows
from learner.plan.topology import plan_topology
from learner.run.command import main
from protocol.errors import SettingsError
from protocol.settings.loader import load_settings

SHELF = Path(__file__).resolve().parents[3] / "deploy" / "configs" / "plans"
PLANS = {
    "70b_2_nodes_shared": "h100_2_nodes",
    "70b_4_nodes": "h100_4_nodes",
    "70b_8_nodes": "h100_8_nodes",
}


OF_EXAMPLES = {"llama_8b", "llama2_7b", "codellama_34b", "mixtral_8x7b"}  # docs/do/openrlhf_examples.md


def plan_of(name: str, *options: str) -> Topology:
    description = read_description(SHELF / f"{PLANS[name]}.yaml")
    assert description.model is not None
    settings = load_settings(SHELF / f"{name}.yaml", list(options))
    sizes = Sizes(described_size(description.model, settings.policy.lora))
    return plan_topology(settings, sizes, described_nodes(description))


def test_every_file_of_the_shelf_is_tested() -> None:
    assert {path.stem for path in SHELF.glob("*.yaml")} == set(PLANS) | set(PLANS.values()) | OF_EXAMPLES


@pytest.mark.parametrize("name", PLANS)
def test_the_table_in_a_plans_first_lines_is_the_one_that_is_drawn(name: str) -> None:
    head = [line[1:] for line in (SHELF / f"{name}.yaml").read_text().splitlines() if line.startswith("#")]
    told = [tuple(cell.strip() for cell in line.split("|")) for line in head if "|" in line]
    assert told[1:] == node_rows(plan_of(name))


@pytest.mark.parametrize("name", ["70b_4_nodes", "70b_8_nodes"])
def test_weights_gathered_within_a_node_are_counted_as_the_plan_says(name: str) -> None:
    text = (SHELF / f"{name}.yaml").read_text()
    asked = '{"zero_optimization": {"zero_hpz_partition_size": 8}}'
    assert "learner.deepspeed: {zero_optimization: {zero_hpz_partition_size: 8}}" in text
    more = plan_of(name, "--learner.deepspeed", asked).ranks.memory_bytes - plan_of(name).ranks.memory_bytes
    assert f"{more / 1e9:.1f} GB more on each GPU" in text


_PPO_WITH_KL = ["--learner.recipe", "ppo", "--kl.coefficient", "0.05", "--learner.offload", "optimizer"]


@pytest.mark.parametrize("options", [[], _PPO_WITH_KL])
@pytest.mark.parametrize("name", PLANS)
def test_a_plan_of_the_shelf_leaves_room_on_each_card(name: str, options: list[str]) -> None:
    plan = plan_of(name, *options)
    for processes in (plan.ranks, plan.servers):
        for node in processes.places:
            assert node.gpu_bytes is not None
            assert processes.memory_bytes < 0.85 * node.gpu_bytes


@pytest.mark.parametrize("name", PLANS)
def test_the_command_draws_a_plan_without_nodes_or_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLUICE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "160")
    options = ["--config", str(SHELF / f"{name}.yaml"), "--plan", "--cluster", str(SHELF / f"{PLANS[name]}.yaml")]
    status, told = main(options), capsys.readouterr()
    assert (status, told.err) == (0, "")
    drawn = [tuple(cell.strip() for cell in line.split("│")[1:-1]) for line in told.out.splitlines() if "│" in line]
    assert drawn[3:] == node_rows(plan_of(name))
    num_gpus = 8 * len(plan_of(name).nodes)
    assert f"In all: {num_gpus} of {num_gpus} GPUs" in told.out


def test_a_described_plan_says_that_other_models_are_counted_as_the_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLUICE_HOME", str(tmp_path))
    shape = "num_hidden_layers: 2, hidden_size: 64, num_attention_heads: 4, intermediate_size: 128"
    (tmp_path / "cluster.yaml").write_text(f"nodes: [{{gpus: 8}}]\nmodel: {{parameters: 1.0e+9, {shape}}}")
    of_run = ["--policy.model", "a/model", "--data.train", "rows.jsonl", "--kl.coefficient", "0.1"]
    assert main([*of_run, "--reference.model", "a/small", "--plan", "--cluster", str(tmp_path / "cluster.yaml")]) == 0
    assert "with the policy, each counted as large as it: the reference." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nodes: []", "nodes = [] is wrong: List should have at least 1 item"),
        ("nodes: [{gpu: 8}]", "nodes.0.gpu = 8 is wrong: Extra inputs are not permitted"),
        ("nodes: [{count: 0}]", "nodes.0.count = 0 is wrong: Input should be greater than 0"),
        ("nodes: [{gpus: yes}]", "nodes.0.gpus = True is wrong: expected a number; YAML reads yes, no,"),
        ("nodes: [8]", "nodes.0 = 8 is wrong: expected a map. Each of nodes has"),
        ("nodes: [{resources: {h100: 0.5}}]", "nodes.0.resources.h100 = 0.5 is wrong: Input should be a multiple of 1"),
        ("nodes: [{resources: {GPU: 8}}]", "nodes.0.resources = {'GPU': 8} is wrong: GPU is a resource"),
        ("nodes: [{resources: {v100: 1.0e+308}}]", "nodes.0.resources.v100 = 1e+308 is wrong: Input should be less"),
        ("{}", "nodes is missing. Each of nodes has"),
        ("nodes: [{gpus: 8}]\nmodel: {parameters: 70b}", "model.parameters = '70b' is wrong: Input should be a valid"),
        ("nodes: [{gpus: 8}]\nmodel: 5", "model = 5 is wrong: expected a map. A model has"),
        (
            "nodes: [{gpus: 8}]\nmodel: {parameters: 7.0e10}",
            "model.num_hidden_layers is missing. A model has parameters, num_hidden_layers, hidden_size,",
        ),
    ],
)
def test_a_description_that_is_wrong_is_refused_with_what_it_may_hold(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError) as caught:
        read_description(path)
    assert str(caught.value).startswith(f"{path}: {says}")
    is_of_model = says.startswith("model")
    held = "num_experts_per_tok." if is_of_model else "has count, name, gpus, gpu_memory_gb, memory_gb, resources."
    assert str(caught.value).endswith(held)


def test_a_described_model_may_be_the_path_of_its_config(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 512, "model_type": "qwen2"}))
    path = tmp_path / "cluster.yaml"
    path.write_text("nodes: [{gpus: 8}]\nmodel: {parameters: 1.0e+6, config: config.json, num_hidden_layers: 3}")
    model = read_description(path).model
    assert model is not None
    assert (model.hidden_size, model.num_hidden_layers) == (64, 3)
    path.write_text("nodes: [{gpus: 8}]\nmodel: {parameters: 1.0e+6, config: other.json}")
    with pytest.raises(SettingsError, match=r"other\.json cannot be used \(FileNotFoundError\)\. Give the path of"):
        read_description(path)


def test_a_described_cluster_is_for_plans_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cluster", "mine.yaml"]) == 2
    assert "--cluster mine.yaml belongs to --plan" in capsys.readouterr().err


_ON_16_GPUS = ("--learner.num_ranks=16", "--learner.zero_stage=3", "--rollout.tensor_parallel_size=8")


def test_plan_as_json_has_each_role_and_node(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--plan", "--cluster", str(SHELF / "h100_4_nodes.yaml"), "--json", "--run.max_epochs", "2"]
    assert main([*options, "--policy.model", "x", "--data.train", "y", *_ON_16_GPUS, "--learner.offload=all"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert [(role["role"], role["count"]) for role in planned["processes"]][1:] == [
        ("learner rank", 16),
        ("rollout server", 1),
    ]
    assert "Steps 1 to the end of 2 epochs of 32 groups" in " ".join(planned["facts"])
    assert planned["facts"][-1] == "Planned, not run: no GPU has run this version of Sluice yet."
