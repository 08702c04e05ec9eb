"""The head of a critic that begins as a reward model of another trainer."""

import json
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from learner.models.critic import load_value_model
from learner.models.model_loading import load_model
from learner.models.reward_model import find_unserved
from learner.models.weights.pushed import as_on_disk, weights_of
from protocol.errors import OperatorError
from protocol.value_heads import HEAD_NAMES
from tests.benchmarks.packing_table import settings_of
from tests.fakes.tiny_models import make_tiny_mixture, make_tiny_model

HIDDEN = 32
HEAD = torch.linspace(-1.0, 1.0, HIDDEN)[None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "reward_model", tied=False, hidden_size=HIDDEN, num_layers=1)


def add(folder: Path, tensors: dict[str, Tensor], prefix: str = "") -> None:
    """Add tensors to the folder's file, with a prefix before the body's names."""
    path = folder / "model.safetensors"
    body = {
        prefix + name.removeprefix("model.") if prefix else name: tensor for name, tensor in load_file(path).items()
    }
    save_file(body | tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("name", HEAD_NAMES)
def test_heads_of_other_trainers_are_loaded_with_their_bias(folder: Path, name: str) -> None:
    add(folder, {f"{name}.weight": HEAD, f"{name}.bias": torch.tensor([3.0])})
    model = load_value_model(settings_of(folder))
    assert torch.equal(model.score.weight, HEAD)
    assert float(model.bias) == 3.0


@pytest.mark.parametrize(("more", "std", "bias"), [({}, 2.0, -1.0), ({"normalize_reward": False}, 1.0, 3.0)])
def test_values_have_the_unit_of_the_rewards_that_the_reward_model_serves(
    folder: Path, more: dict[str, bool], std: float, bias: float
) -> None:
    add(folder, {"score.weight": HEAD, "score.bias": torch.tensor([3.0])})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"mean": 5.0, "std": 2.0} | more))
    critic = load_value_model(replace(settings_of(folder), role="critic"))
    assert torch.equal(critic.score.weight, HEAD / std)
    assert float(critic.bias) == bias


def test_mixture_as_a_reward_model_is_written_as_transformers_reads_it(tmp_path: Path) -> None:
    folder = make_tiny_mixture(tmp_path / "mixture")
    model = load_value_model(settings_of(folder))
    on_disk = as_on_disk(model, {weight.name: weight.merge() for weight in weights_of(model)})
    save_file({name: each.clone() for name, each in on_disk.items()}, folder / "model.safetensors", {"format": "pt"})
    read, report = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, output_loading_info=True)
    assert not report["missing_keys"] | report["unexpected_keys"]
    own = dict(model.named_parameters())
    assert all(torch.equal(own[name], each) for name, each in read.named_parameters())


@pytest.mark.parametrize(("kind", "is_served"), [("qwen2", True), ("granite", False)])
def test_model_without_sequence_classification_is_reported(tmp_path: Path, kind: str, is_served: bool) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    text = find_unserved(tmp_path) or ""
    assert ("sluice serve-reward cannot load the trained reward model" in text) is not is_served


def test_body_of_a_wrapped_model_is_loaded(folder: Path) -> None:
    before = load_value_model(settings_of(folder)).state_dict()
    add(folder, {"v_head.weight": HEAD}, prefix="rwtransformer.")
    after = load_value_model(settings_of(folder)).state_dict()
    assert torch.equal(after.pop("score.weight"), HEAD)
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())


def test_head_in_a_pickled_file_is_loaded(folder: Path) -> None:
    path = folder / "model.safetensors"
    torch.save({**load_file(path), "value_head.weight": HEAD}, folder / "pytorch_model.bin")
    path.unlink()
    assert torch.equal(load_value_model(settings_of(folder)).score.weight, HEAD)


def test_policy_as_a_critic_has_a_head_of_zeros(folder: Path) -> None:
    assert not load_value_model(settings_of(folder)).score.weight.any()


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"output.weight": HEAD}, r"it has the tensors output\.weight, and one head named score"),
        ({"gate.weight": HEAD}, r"it has the tensors gate\.weight, and one head named score, value_head"),
        (
            {"score.weight": HEAD, "v_head.weight": HEAD.clone()},
            r"it has the tensors score\.weight, v_head\.weight, and",
        ),
        (
            {"score.weight": torch.zeros(1, HIDDEN), "score.bias": torch.zeros(2)},
            r"its head score has a bias of the shape \(2,\), expected \(1,\)",
        ),
        ({"score.weight": torch.zeros(2, HIDDEN)}, r"its head score has the shape \(2, 32\), expected \(1, 32\)"),
    ],
)
def test_other_tensors_are_refused_by_name(folder: Path, tensors: dict[str, Tensor], words: str) -> None:
    add(folder, tensors)
    with pytest.raises(OperatorError, match=rf"^The critic cannot begin as .*reward_model: {words}"):
        load_value_model(settings_of(folder))


LAYER = "model.layers.0.self_attn"


@pytest.mark.parametrize(
    ("name", "is_refused"),
    [
        ("model.layers.0.attn.bias", True),
        ("model.layers.0.attn.bias of a mask", False),
        (f"{LAYER}.q_proj.lora_A.weight", True),
        ("model.layers.9.mlp.up_proj.weight", True),
        ("lm_head.lora_A.weight", True),
        (f"{LAYER}.o_proj.bias", True),
        (f"{LAYER}.rotary_emb.inv_freq", False),
        ("value_head.weight", False),
    ],
)
def test_weights_that_a_language_model_would_leave_out_are_refused(folder: Path, name: str, is_refused: bool) -> None:
    add(folder, {name.removesuffix(" of a mask"): torch.ones(1, 1, 8, 8) if "of a mask" in name else HEAD})
    with pytest.raises(OperatorError, match=re.escape(name)) if is_refused else nullcontext():
        load_model(settings_of(folder))


@pytest.mark.parametrize("is_refused", [False, True])
def test_head_that_differs_from_the_embedding_it_is_tied_to_is_refused(tmp_path: Path, is_refused: bool) -> None:
    folder = make_tiny_model(tmp_path / "tied", tied=True, hidden_size=HIDDEN, num_layers=1)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    add(folder, {"lm_head.weight": embedding + is_refused})
    with pytest.raises(OperatorError, match="tie_word_embeddings") if is_refused else nullcontext():
        load_model(settings_of(folder))


def test_folder_without_some_weights_is_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(OperatorError, match=r"lack 1 tensors of a qwen2 model, such as model\.norm\.weight\."):
        load_model(settings_of(folder))


def test_folder_with_a_weight_of_another_shape_is_refused_by_name(folder: Path) -> None:
    add(folder, {"model.norm.weight": torch.ones(HIDDEN + 1)})
    found = rf"another shape .* 1 tensors, such as model\.norm\.weight: \({HIDDEN + 1},\) .*, expected \({HIDDEN},\)\."
    with pytest.raises(OperatorError, match=found):
        load_model(settings_of(folder))


@pytest.mark.parametrize("has_head", [True, False])
def test_reward_model_as_a_policy_is_refused_by_what_it_is(folder: Path, has_head: bool) -> None:
    tensors = load_file(folder / "model.safetensors") | {"score.weight": HEAD}
    if not has_head:  # as objective = reward_model saves it
        del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(OperatorError, match=r"are of a reward model \(score.weight\), which writes no text"):
        load_model(settings_of(folder))
