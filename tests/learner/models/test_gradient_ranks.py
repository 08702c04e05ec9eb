"""One gradient, whatever ranks, ZeRO stage, offload and gradient checkpointing: DeepSpeed for real."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Ernie4_5_MoeConfig, Ernie4_5_MoeForCausalLM

from learner.disk.model_folder import BYTES, read_model_size
from learner.plan.memory import trained_memory
from protocol.settings.policy import LoraSettings
from protocol.settings.zero_stage import zero_stage_of
from tests.fakes.tiny_models import byte_tokenizer, make_tiny_model
from tests.fakes.warm_process import run_warm
from tests.learner.models.gradient_ranks import ALL, CASES, CRITIC_CASES, LORA_CASES, LOW_CASES, WORLDS, cases_of

pytestmark = [pytest.mark.stack, pytest.mark.ranks]
Found = dict[str, dict[str, Any]]
_ADAPTERS = LoraSettings(rank=4)


def in_every_world(names: Iterable[str]) -> pytest.MarkDecorator:
    pairs = [(world_size, name) for world_size in WORLDS for name in names if name in cases_of(world_size)]
    return pytest.mark.parametrize(("world_size", "name"), pairs)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gradients")


@pytest.fixture(scope="module")
def found(folder: Path) -> Found:
    """Return [ranks, or "read"][case] -> what gradient_ranks found."""
    make_tiny_model(folder / "model", tied=True, hidden_size=64)
    make_mixture(folder / "mixture")
    ended = run_warm("tests.learner.models.gradient_ranks", str(folder), timeout=600)
    assert ended.returncode == 0, ended.stderr[-3000:]
    sizes = {name: read_model_size(folder / "model", _ADAPTERS if name in LORA_CASES else None) for name in ALL}
    return {"sizes": sizes, **{name: torch.load(folder / f"{name}.pt") for name in (*map(str, WORLDS), "read")}}


def make_mixture(folder: Path) -> None:
    config = Ernie4_5_MoeConfig(
        **{"vocab_size": 272, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
        **{"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 512},
        **{"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_start_index": 1},
        **{"initializer_range": 0.1, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0},
    )
    torch.manual_seed(0)
    model = Ernie4_5_MoeForCausalLM(config)
    (bias,) = (each for each in model.parameters() if not each.requires_grad)
    bias.normal_(std=0.01)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@in_every_world(CASES)
def test_gradient_is_the_same_to_a_millionth(found: Found, world_size: int, name: str) -> None:
    gradient = found[str(world_size)][name]["exp_avg"]
    assert distance(gradient, found["1"]["zero 0"]["exp_avg"]) < 1e-6


@in_every_world(LOW_CASES)
def test_gradient_in_bfloat16_is_that_of_float32_to_its_rounding(found: Found, world_size: int, name: str) -> None:
    gradient = found[str(world_size)][name]["exp_avg"]
    assert distance(gradient, found["1"]["zero 0"]["exp_avg"]) < 0.02


@in_every_world(LOW_CASES)
def test_bfloat16_weights_are_rounded_from_float32_masters(found: Found, world_size: int, name: str) -> None:
    of_case = found[str(world_size)][name]
    assert of_case["dtype"] == torch.bfloat16
    assert torch.equal(of_case["weight"].bfloat16(), of_case["model"].bfloat16())
    assert not torch.equal(of_case["weight"], of_case["model"])


@in_every_world([name for name in CASES if name != "zero 0"])
def test_push_is_the_weights_of_any_ranks_and_stage(found: Found, world_size: int, name: str) -> None:
    expected = found["1"]["zero 0"]["pushed"]
    # A step is 5e-4. Adam makes more of rounding where a gradient is as small as its epsilon: here in one weight.
    torch.testing.assert_close(found[str(world_size)][name]["pushed"], expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ALL)
def test_memory_of_a_rank_equals_the_plan(found: Found, name: str) -> None:
    world_size, case = 2, ALL[name]
    dtype = case.get("dtype", "float32")
    stage = zero_stage_of(case.get("zero_stage", 0), dtype)
    size = found["sizes"][name]
    planned = trained_memory(size, dtype, stage, world_size, case.get("offload", "none"))
    bucket = BYTES[dtype] * (size.adapters or size.parameters)  # which is not there all the time
    held = found[str(world_size)][name]["held"]
    assert 0.97 * (planned.state + planned.host - bucket) < held < 1.06 * (planned.device + planned.host)


@in_every_world(LORA_CASES)
def test_adapters_are_trained_and_pushed_merged_alike_on_any_ranks_and_stage(
    found: Found, world_size: int, name: str
) -> None:
    expected, of_case = found["1"]["lora, zero 0"], found[str(world_size)][name]
    assert distance(of_case["exp_avg"], expected["exp_avg"]) < 1e-6
    assert len(of_case["exp_avg"]) < len(found["1"]["zero 0"]["exp_avg"]) / 4
    torch.testing.assert_close(of_case["pushed"], expected["pushed"], rtol=0, atol=2e-6)
    assert len(of_case["pushed"]) == len(found["1"]["zero 0"]["pushed"])


@in_every_world(CRITIC_CASES)
def test_gradient_of_the_critic_is_the_same_to_a_millionth(found: Found, world_size: int, name: str) -> None:
    gradient = found[str(world_size)][name]["exp_avg"]
    assert distance(gradient, found["1"]["critic, zero 0"]["exp_avg"]) < 1e-6


@pytest.mark.parametrize("world_size", [2, 4])
def test_exported_adapters_loaded_by_peft_equal_the_merged_model(found: Found, folder: Path, world_size: int) -> None:
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(folder / "model")
    exported = folder / f"{world_size} export"
    tokens = torch.arange(6, 30)[None]
    plain = base(tokens).logits.detach()
    adapted = PeftModel.from_pretrained(base, str(exported / "adapter"))(tokens).logits.detach()
    merged = AutoModelForCausalLM.from_pretrained(exported)(tokens).logits.detach()
    torch.testing.assert_close(adapted, merged, rtol=0, atol=1e-4)
    assert float((merged - plain).abs().max()) > 1e-3


@pytest.mark.parametrize(("name", "most"), [("zero 2", 1e-5), ("zero 3, bfloat16", 0.1)])
def test_mixture_with_a_router_in_float32_and_a_fixed_bias_has_the_gradient_of_one_rank(
    found: Found, name: str, most: float
) -> None:
    """A bias that rank 0 alone trains ended the ranks, and ZeRO 3 refuses parameters of two types."""
    gradient = found["2"][f"mixture, {name}"]["exp_avg"]
    assert distance(gradient, found["1"]["mixture, zero 0"]["exp_avg"]) < most


@pytest.mark.parametrize("name", ["zero 2", "zero 3, bfloat16"])
def test_fixed_bias_of_a_router_is_the_folders_in_float32_on_each_rank(found: Found, folder: Path, name: str) -> None:
    tensors = load_file(folder / "mixture" / "model.safetensors")
    (expected,) = (tensor for name, tensor in tensors.items() if name.endswith("correction_bias"))
    assert expected.any()
    assert torch.equal(found["2"][f"mixture, {name}"]["bias"], expected)


@in_every_world([*CASES, *LORA_CASES, *CRITIC_CASES])
def test_resume_from_each_state_on_one_rank_in_stage_0_equals_an_uninterrupted_run(
    found: Found, world_size: int, name: str
) -> None:
    expected = found[str(world_size)][name]["further"]
    # Adam makes steps of gradients that are nothing but rounding: a two-hundredth of its learning rate is let be.
    torch.testing.assert_close(found["read"][f"{world_size} {name}"], expected, rtol=0, atol=5e-6)
