"""Adapters that PEFT writes for TRL and verl, merged into their base by `sluice migrate`, give the adapter's model."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from deploy.command import run_verb
from learner.disk.model_folder import find_named_model
from protocol.errors import SettingsError
from tests.fakes.tiny_models import byte_tokenizer, make_tiny_model


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("base") / "model", tied=False)


def _adapted(base: Path, target_modules: Sequence[str] = ("q_proj", "down_proj")) -> Any:
    """Return PEFT's model on the base, with adapters that change it."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, lora_alpha=16, target_modules=list(target_modules), task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "lora_embedding_A" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    return model.eval()


def _save_as_trl(model: Any, folder: Path) -> None:
    """Write what TRL's trainers do: the adapter and the tokenizer."""
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def _save_as_verl(model: Any, folder: Path) -> None:
    """Write what verl's checkpoints hold in lora_adapter."""
    from peft import get_peft_model_state_dict

    folder.mkdir()
    config = asdict(model.peft_config["default"])
    config |= {"task_type": "CAUSAL_LM", "peft_type": config["peft_type"].value}
    config["target_modules"] = sorted(config["target_modules"])
    save_file(get_peft_model_state_dict(model), folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")


def _logits(model: Any) -> Tensor:
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 262, 20))[None]
    with torch.no_grad():
        logits: Tensor = model(input_ids=tokens).logits
    return logits


@pytest.mark.filterwarnings("ignore:The configuration file contains a `runtime_config` key")  # verl writes it
@pytest.mark.parametrize("save", [_save_as_trl, _save_as_verl])
def test_merged_folder_is_the_adapters_model(base: Path, tmp_path: Path, save: Any) -> None:
    model = _adapted(base)
    save(model, tmp_path / "adapter")
    assert run_verb(["migrate", str(tmp_path / "adapter"), "--output", str(tmp_path / "whole")]) == 0
    folder = find_named_model("policy.model", str(tmp_path / "whole"))
    found = _logits(AutoModelForCausalLM.from_pretrained(folder).eval())
    torch.testing.assert_close(found, _logits(model), rtol=0, atol=1e-4)
    assert (found - _logits(AutoModelForCausalLM.from_pretrained(base).eval())).abs().max() > 0.1
    assert AutoTokenizer.from_pretrained(folder)("12")["input_ids"] == byte_tokenizer()("12")["input_ids"]


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings", "ignore:Setting `save_embedding_layers` to `True`")
@pytest.mark.parametrize("targets", [["q_proj", "embed_tokens"], ["lm_head"]])
def test_adapter_on_one_end_of_a_tied_model_leaves_the_other_end_as_it_is(tmp_path: Path, targets: list[str]) -> None:
    tied = make_tiny_model(tmp_path / "tied", tied=True)
    model = _adapted(tied, target_modules=targets)
    _save_as_trl(model, tmp_path / "adapter")
    assert run_verb(["migrate", str(tmp_path / "adapter"), "--output", str(tmp_path / "whole")]) == 0
    found = _logits(AutoModelForCausalLM.from_pretrained(tmp_path / "whole").eval())
    torch.testing.assert_close(found, _logits(model), rtol=0, atol=1e-4)
    assert (found - _logits(AutoModelForCausalLM.from_pretrained(tied).eval())).abs().max() > 0.1


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`")
@pytest.mark.parametrize("tied", [True, False])
def test_adapter_with_added_tokens_has_them_in_the_merged_folder(tmp_path: Path, tied: bool) -> None:
    from peft import LoraConfig, get_peft_model

    folder = make_tiny_model(tmp_path / "base", tied=tied)
    larger = AutoModelForCausalLM.from_pretrained(folder)
    larger.resize_token_embeddings(280, mean_resizing=False)
    model: Any = get_peft_model(larger, LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")).eval()
    _save_as_trl(model, tmp_path / "adapter")
    assert run_verb(["migrate", str(tmp_path / "adapter"), "--output", str(tmp_path / "whole")]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "whole").eval()
    assert merged.config.vocab_size == 280
    torch.testing.assert_close(_logits(merged), _logits(model), rtol=0, atol=1e-4)


def test_adapter_without_its_base_is_refused(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _save_as_trl(_adapted(base), tmp_path / "adapter")
    config = tmp_path / "adapter" / "adapter_config.json"
    given = json.loads(config.read_text(encoding="utf-8")) | {"base_model_name_or_path": str(tmp_path / "gone")}
    config.write_text(json.dumps(given), encoding="utf-8")
    assert run_verb(["migrate", str(tmp_path / "adapter"), "--output", str(tmp_path / "whole")]) == 2
    assert "Set base_model_name_or_path in its adapter_config.json to a model in reach." in capsys.readouterr().err
    assert not (tmp_path / "whole").exists()


@pytest.mark.filterwarnings("ignore:Found missing adapter keys")
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            lambda name: name.replace("model.layers", "model.language_model.layers"),
            "8 tensors have no place there and 8",
        ),
        (lambda name: name if ".layers.0." in name else None, "0 tensors have no place there and 4 are missing"),
        (lambda name: name if "down_proj.lora_A" not in name else "base_model.model.score.weight", "1 tensors have no"),
    ],
)
def test_adapter_that_its_base_does_not_take_whole_is_refused(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Callable[[str], str | None], problem: str
) -> None:
    _save_as_trl(_adapted(base), tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    changed = {change(name): tensor for name, tensor in load_file(file).items()}
    save_file({name: tensor for name, tensor in changed.items() if name}, file, metadata={"format": "pt"})
    assert run_verb(["migrate", str(tmp_path / "adapter"), "--output", str(tmp_path / "whole")]) == 2
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "whole").exists()


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        (["adapter_config.json"], "It is an adapter: sluice migrate {0} --output MODEL merges it into its base."),
        (
            ["model_world_size_2_rank_0.pt"],
            "It has shards of verl: python -m verl.model_merger merge --backend fsdp --local_dir {0}",
        ),
        (["actor/model_world_size_2_rank_0.pt"], "It is a checkpoint of verl: give {0}/actor."),
        (
            ["checkpoint-20/config.json", "checkpoint-100/config.json"],
            "It is a trainer's folder: give {0}/checkpoint-100.",
        ),
        (["mp_rank_00_model_states.pt"], "It is a checkpoint of DeepSpeed: its zero_to_fp32.py"),
        (["model/config.json"], "It is a checkpoint: give {0}/model."),
        ([], "Give a Hugging Face model folder."),
    ],
)
def test_folder_of_another_trainer_is_refused_with_the_cure(tmp_path: Path, files: list[str], sentence: str) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}", encoding="utf-8")
    with pytest.raises(SettingsError) as caught:
        find_named_model("policy.model", str(tmp_path))
    assert f"policy.model = {tmp_path} has no config.json. {sentence.format(tmp_path)}" in str(caught.value)
