"""What a rank's models take of memory, from settings and sizes alone."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from learner.disk.model_folder import ModelSize, adapters_of_shape, read_model_size, size_of_shape
from learner.plan.memory import Memory, Sizes, activation_bytes, push_bytes, rank_memory, read_sizes, trained_memory
from protocol.settings.policy import LoraSettings
from protocol.settings.settings import Settings
from protocol.settings.zero_stage import Offload
from tests.fakes.tiny_models import make_tiny_model

SHAPED = ModelSize(1000, num_layers=3, hidden_size=8, kept_in_layer=100)


def settings(**sections: Any) -> Settings:
    return Settings.model_validate({"policy": {"dtype": "float32"}, **sections})


@pytest.mark.parametrize(
    ("dtype", "zero_stage", "expected"),
    [
        ("float32", 0, 4000 + 4000 + 8000 + 4000),
        ("float32", 2, 4000 + 1000 + 3000 + 2 * 4000 + 1000),
        ("bfloat16", 1, 2000 + 4000 + 3000 + 2 * 2000 + 1000),
        ("bfloat16", 2, 2000 + 1000 + 3000 + 2 * 2000 + 1000),
        ("bfloat16", 3, 500 + 1000 + 3000 + 2 * 2000 + 1000),
    ],
)
def test_a_trained_model_takes_what_zero_leaves_on_a_rank(dtype: str, zero_stage: int, expected: int) -> None:
    assert trained_memory(ModelSize(1000), dtype, zero_stage, 4, "none") == Memory(expected)


def test_adapters_alone_have_gradients_and_moments() -> None:
    adapted = trained_memory(ModelSize(1000, adapters=40), "float32", 0, 1, "none")
    assert adapted == Memory(4 * 1040 + 12 * 40 + 4 * 40)


@pytest.mark.parametrize(
    ("offload", "expected"),
    [("optimizer", Memory(500 + 2 * 2000 + 1000, 3000 + 2000)), ("all", Memory(2 * 2000 + 1000, 500 + 3000 + 2000))],
)
def test_what_is_offloaded_is_in_host_memory(offload: Offload, expected: Memory) -> None:
    assert trained_memory(ModelSize(1000), "bfloat16", 3, 4, offload) == expected


def test_buffers_of_a_large_model_are_as_large_as_deepspeeds_limits() -> None:
    large = trained_memory(ModelSize(8_000_000_000), "bfloat16", 3, 8, "none")
    assert large.device == (2 + 4 + 12) * 1_000_000_000 + 2 * 1_000_000_000 + (2 * 2) * 500_000_000 + 250_000_000


def test_all_experts_of_a_layer_are_gathered_at_once() -> None:
    config = {"num_hidden_layers": 1, "hidden_size": 5120, "num_attention_heads": 8, "intermediate_size": 12288}
    size = size_of_shape(8_000_000_000, config | {"n_routed_experts": 160, "moe_intermediate_size": 1536})
    plain = size_of_shape(8_000_000_000, config)
    more = (
        trained_memory(size, "bfloat16", 3, 8, "none").passing - trained_memory(plain, "bfloat16", 3, 8, "none").passing
    )
    assert more == 2 * (160 * 2 * 1536 * 5120 - 1_000_000_000)


def test_stage_0_in_bfloat16_is_planned_as_the_stage_that_runs() -> None:
    asked = [settings(policy={"dtype": "bfloat16"}, learner={"zero_stage": stage, "num_ranks": 2}) for stage in (0, 2)]
    first, second = (rank_memory(each, Sizes(ModelSize(1000))) for each in asked)
    assert first == second


def test_critic_counts_at_its_own_stage_and_the_reference_at_the_policys() -> None:
    given = settings(learner={"recipe": "ppo", "num_ranks": 2, "zero_stage": 3}, critic={"zero_stage": 2})
    of_policy, of_critic = (trained_memory(ModelSize(1000), "float32", stage, 2, "none") for stage in (3, 2))
    assert rank_memory(given, Sizes(ModelSize(1000))) == of_policy + of_critic + Memory(4 * 1000 // 2)


def test_model_that_is_only_scored_takes_its_weights_alone() -> None:
    sections = {"learner": {"recipe": "ppo"}, "kl": {"coefficient": 0.1}, "run": {"max_steps": 0}}
    assert rank_memory(settings(**sections), Sizes(SHAPED)) == Memory(4 * 1000)


def test_models_that_the_settings_name_count_by_their_own_sizes() -> None:
    given = settings(learner={"recipe": "ppo"})
    sizes = Sizes(ModelSize(1000), critic=ModelSize(50), reference=ModelSize(7))
    assert rank_memory(given, sizes) == Memory(20 * 1000 + 12 * 50 + 4 * 7)


def test_reference_that_is_offloaded_is_on_the_device_too_while_it_is_used() -> None:
    given = settings(kl={"coefficient": 0.1}, reference={"offload": True})
    assert rank_memory(given, Sizes(ModelSize(1000))) == Memory(20 * 1000 + 4000, 4000)


def test_reference_of_a_policy_with_adapters_takes_nothing() -> None:
    given = {"policy": {"dtype": "float32", "lora": {"rank": 2}}, "kl": {"coefficient": 0.1}}
    size = ModelSize(1000, adapters=40)
    alone = trained_memory(size, "float32", 0, 1, "none")
    assert rank_memory(Settings.model_validate(given), Sizes(size)) == alone
    refreshed = Settings.model_validate({**given, "reference": {"refresh_every_steps": 5}})
    assert rank_memory(refreshed, Sizes(size)) == alone + Memory(4 * 1000)


def test_activations_are_of_the_longest_micro_batch_and_checkpointing_leaves_one_layer_of_them() -> None:
    plain = settings(learner={"micro_batch_tokens": 10}, rollout={"max_context_tokens": 600})
    assert activation_bytes(SHAPED, plain) == 600 * 3 * 100 * 4
    checkpointed = settings(learner={"micro_batch_tokens": 1000, "gradient_checkpointing": True})
    checkpointed = checkpointed.model_copy(update={"rollout": plain.rollout})
    assert activation_bytes(SHAPED, checkpointed) == 1000 * (3 * 8 + 100) * 4


def test_critics_activations_are_not_there_beside_the_policys() -> None:
    given = settings(learner={"recipe": "ppo", "micro_batch_tokens": 1000}, rollout={"max_context_tokens": 600})
    without = Sizes(ModelSize(1000))
    difference = rank_memory(given, Sizes(SHAPED)).device - rank_memory(given, without).device
    of_head = 12 * (1 << 22) + 4 * 8192 * 8
    assert difference == activation_bytes(SHAPED, given) + of_head - 4 * 1000  # gradients are reduced later


@pytest.mark.parametrize(
    ("shape", "moe", "kept"),  # shape: hidden size, heads, key-value heads, head size, intermediate size
    [
        # Llama 3.1 70B: 6 * 8192 between norms, 3 * 8192 + 2 * 1024 in attention, 4 * 28672
        ((8192, 64, 8, None, 28672), {}, 190464),
        # Qwen3 4B: 32 heads of 128 with a hidden size of 2560
        ((2560, 32, 8, 128, 9728), {}, 6 * 2560 + 3 * 4096 + 2 * 1024 + 4 * 9728),
        # Qwen3 30B-A3B: 8 experts of 768 for a token; 6144 is for layers without experts
        (
            (2048, 32, 4, 128, 6144),
            {"moe_intermediate_size": 768, "num_experts_per_tok": 8},
            6 * 2048 + 3 * 4096 + 2 * 512 + 4 * 8 * 768,
        ),
        # Mixtral 8x7B: 2 experts of 14336
        ((4096, 32, 8, None, 14336), {"num_experts_per_tok": 2}, 6 * 4096 + 3 * 4096 + 2 * 1024 + 4 * 2 * 14336),
        # DeepSeekMoE 16B: 6 experts of 1408, and 2 for every token
        (
            (2048, 16, None, None, 10944),
            {"moe_intermediate_size": 1408, "num_experts_per_tok": 6, "n_shared_experts": 2},
            6 * 2048 + 3 * 2048 + 2 * 2048 + 4 * 8 * 1408,
        ),
    ],
)
def test_a_layer_keeps_the_activations_of_its_heads_and_experts(
    shape: tuple[int | None, ...], moe: dict[str, int], kept: int
) -> None:
    names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
    config = {name: value for name, value in zip(names, shape, strict=True) if value is not None}
    assert size_of_shape(1000, {"num_hidden_layers": 2, **config, **moe}).kept_in_layer == kept


def test_weights_in_another_programs_form_beside_the_models_are_not_counted(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", tied=False, hidden_size=64)
    size = read_model_size(folder, LoraSettings(rank=4))
    whole = folder / "model.safetensors"
    shutil.copy(whole, folder / "consolidated.safetensors")
    assert read_model_size(folder, LoraSettings(rank=4)) == size
    whole.rename(folder / "model-00001-of-00001.safetensors")  # as large models are stored
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_model_size(folder, LoraSettings(rank=4)) == size


def test_size_is_read_from_the_model_folder(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", tied=True, hidden_size=64)
    critic = {"critic": {"model": str(folder)}, "learner": {"advantage": "gae"}}
    given = settings(policy={"model": str(folder), "lora": {"rank": 4}}, **critic)
    sizes = read_sizes(given, folder)
    attention, mlp = 4 * (64 + 64), 3 * (64 + 192)
    assert sizes.policy.adapters == 4 * 2 * (attention + mlp)
    assert (sizes.policy.num_layers, sizes.policy.hidden_size) == (2, 64)
    assert sizes.critic == replace(sizes.policy, adapters=0)
    assert sizes.reference is None
    one = given.policy.lora.model_copy(update={"targets": ("q_proj",)})
    assert read_model_size(folder, one).adapters == 4 * 2 * (64 + 64)
    config = json.loads((folder / "config.json").read_text())
    assert [adapters_of_shape(config, lora) for lora in (given.policy.lora, one)] == [
        sizes.policy.adapters,
        4 * 2 * (64 + 64),
    ]
    assert adapters_of_shape({**config, "num_experts_per_tok": 2}, given.policy.lora) == 4 * 2 * attention


@pytest.mark.parametrize(
    ("hidden_size", "intermediate_size", "allocated"),
    [(896, 4864, 544.5e6), (1536, 8960, 933.5e6)],
    ids=["0.5B", "1.5B"],
)
def test_a_push_adds_what_a_real_engine_allocated_while_it_loaded(
    hidden_size: int, intermediate_size: int, allocated: float
) -> None:
    """allocated: the peak of torch's allocations in vLLM's loading, buckets of 16 MiB, on a CPU."""
    shape = {"num_hidden_layers": 2, "num_attention_heads": 14, "vocab_size": 151936}
    size = size_of_shape(1, {**shape, "hidden_size": hidden_size, "intermediate_size": intermediate_size})
    settings = Settings.model_validate({"policy": {"dtype": "bfloat16"}})
    assert push_bytes(settings, size, 16 << 20, on_gpus=True) == pytest.approx(allocated, rel=0.05)


@pytest.mark.parametrize(
    ("num_experts", "hidden_size", "of_expert", "allocated", "on_cpus"),
    [(64, 1024, 256, 217.7e6, 318.4e6), (64, 1024, 768, 620.4e6, 922.4e6), (16, 2048, 1024, 415.3e6, 616.7e6)],
)
def test_a_push_of_a_mixture_adds_what_a_real_engine_allocated_while_it_loaded(
    num_experts: int, hidden_size: int, of_expert: int, allocated: float, on_cpus: float
) -> None:
    """allocated, on_cpus: the peaks of tests.learner.plan.measured_push as on a GPU, and where experts are packed."""
    shape = {"num_hidden_layers": 2, "num_attention_heads": 8, "intermediate_size": 512, "vocab_size": 4096}
    mixture = {"num_experts": num_experts, "num_experts_per_tok": 4, "moe_intermediate_size": of_expert}
    size = size_of_shape(1, {**shape, **mixture, "hidden_size": hidden_size})
    settings = Settings.model_validate({"policy": {"dtype": "bfloat16"}})
    assert push_bytes(settings, size, 16 << 20, on_gpus=True) == pytest.approx(allocated, rel=0.02)
    assert push_bytes(settings, size, 16 << 20, on_gpus=False) == pytest.approx(on_cpus, rel=0.02)


@pytest.mark.parametrize(
    ("num_ranks", "zero_stage", "num_layers", "allocated"),
    [(2, 2, 2, 2655.4e6), (2, 2, 8, 4087.0e6), (1, 2, 8, 6164.1e6), (2, 3, 2, 2761.7e6)],
)
def test_a_rank_takes_what_torch_allocated_in_a_real_step(
    num_ranks: int, zero_stage: int, num_layers: int, allocated: float
) -> None:
    """allocated: the peak of tests.learner.plan.measured_ranks for a shape of 0.5B in bfloat16."""
    shape = {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2}
    parameters = (151_936 + 1) * 896 + num_layers * 14_912_384
    size = size_of_shape(parameters, {**shape, "num_hidden_layers": num_layers, "vocab_size": 151_936})
    assert trained_memory(size, "bfloat16", zero_stage, num_ranks, "none").device == pytest.approx(allocated, rel=0.01)
