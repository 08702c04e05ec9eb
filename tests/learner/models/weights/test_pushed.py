"""A push has the names and numbers of the model folder: experts one by one, kept buffers, adapters merged."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch import Tensor

from learner.models.model_loading import load_model
from learner.models.weights.export import export_model
from learner.models.weights.pushed import PushedWeights
from learner.weights.feed import BucketMemory, pack
from tests.benchmarks.packing_table import _BASE, ARCHITECTURES, settings_of
from tests.fakes.model_digest import digest_of_folder, digest_of_model
from tests.fakes.planned_weights import bucket_views

BUCKET_BYTES = 20_000
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_ERNIE = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 1}
# Routers with a fixed bias: a buffer or a parameter, which transformers reads in float32 or rounds.
_BIASED: dict[str, dict[str, Any]] = {
    "Glm4MoeConfig": ARCHITECTURES["Glm4MoeConfig"][0],
    "MiniMaxM2Config": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Ernie4_5_MoeConfig": _ERNIE,
    "AfmoeConfig": {**_MOE, "num_dense_layers": 1, "layer_types": ["full_attention", "full_attention"]},
    "Lfm2MoeConfig": {**_MOE, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
}


def folder_of(name: str, folder: Path) -> Path:
    torch.manual_seed(0)
    config = getattr(transformers, name)(**{**_BASE, **(_BIASED.get(name) or ARCHITECTURES[name][0])})
    made: Any = transformers.AutoModelForCausalLM.from_config(config).float()
    for constant in (*made.buffers(), *(each for each in made.parameters() if not each.requires_grad)):
        constant.data = torch.rand_like(constant)
    made.save_pretrained(folder)
    return folder


def pushed_weights(model: Any, dtype: str = "float32") -> PushedWeights:
    return PushedWeights(model, nullcontext, lambda tensor: tuple(tensor.shape), dtype=dtype, bucket_bytes=BUCKET_BYTES)


# A router's bias that no gradient reaches; experts that are one tensor in memory; a head of another name there.
@pytest.mark.parametrize("architecture", ["Glm4MoeConfig", "MixtralConfig", "Qwen3MoeConfig", "GPTNeoXConfig"])
def test_push_has_every_tensor_of_the_model_folder_under_its_name(tmp_path: Path, architecture: str) -> None:
    source = folder_of(architecture, tmp_path)
    pushed = pushed_weights(load_model(settings_of(source)))
    expected = load_file(source / "model.safetensors")
    found: dict[str, Tensor] = {}
    for planned, flat in zip(
        pushed.plan,
        pack(pushed.plan, pushed.buckets(is_sender=True), BucketMemory(pushed.plan, "cpu")),
        strict=True,
    ):
        assert len(planned) == 1 or sum(meta.num_bytes for meta in planned) <= BUCKET_BYTES
        found |= {name: view.clone() for name, view in bucket_views(flat, planned)}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert len(pushed.plan) > 1


@pytest.mark.parametrize("architecture", ["MixtralConfig", "Qwen3MoeConfig"])
def test_a_part_of_all_experts_is_one_copy_and_places_are_known_before_the_push(
    tmp_path: Path, architecture: str
) -> None:
    model = load_model(settings_of(folder_of(architecture, tmp_path)))
    pushed = PushedWeights(model, nullcontext, lambda part: tuple(part.shape), dtype="float32", bucket_bytes=1 << 26)
    model._weight_conversions = None  # a push needs no names of transformers
    copies = [tensor for bucket in pushed.buckets(is_sender=True) for _, tensor in bucket]
    stacked = [name for name, _ in model.named_parameters() if name.endswith(("gate_up_proj", "down_proj"))]
    assert len(copies) == len(list(model.named_parameters())) + len(stacked) // 2  # gate and up are one in memory


@pytest.mark.parametrize("architecture", _BIASED)
def test_bias_of_a_router_stays_float32_in_pushes_files_and_digests_of_a_bfloat16_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    """The learner computes with it in float32, and so does an engine: rounded, tokens would go to other experts."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "barrier", lambda: None)
    source = folder_of(architecture, tmp_path / "source")
    model = load_model(replace(settings_of(source), dtype="bfloat16"))
    for parameter in model.parameters():  # as a rank does: Ernie's router is read in float32
        parameter.data = parameter.data.bfloat16()
    pushed, on_disk = pushed_weights(model, "bfloat16"), load_file(source / "model.safetensors")
    types = {meta.name: meta.dtype for bucket in pushed.plan for meta in bucket}
    found = {name: tensor.clone() for name, tensor in pushed.tensors(is_sender=True)}
    biases = [name for name in types if name.endswith(("e_score_correction_bias", "expert_bias"))]
    assert biases
    assert all(torch.equal(found[name], on_disk[name]) for name in biases)
    assert {name for name, each in types.items() if each != "bfloat16"} == set(biases)
    export_model(tmp_path / "export", source, model, lambda tensors: nullcontext(), Tensor.numel)
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert all(torch.equal(exported[name], on_disk[name]) for name in biases)
    assert digest_of_folder(tmp_path / "export") == digest_of_model(model, "bfloat16")


def test_ranks_that_send_nothing_gather_every_bucket_and_make_nothing_of_it(tmp_path: Path) -> None:
    pushed = pushed_weights(load_model(settings_of(folder_of("MixtralConfig", tmp_path))))
    assert [list(bucket) for bucket in pushed.buckets(is_sender=False)] == [[]] * len(pushed.plan)


def test_tensors_of_a_bucket_are_gathered_while_they_are_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Beside the bucket that they go into, a few of them are in memory at a time."""
    monkeypatch.setattr("learner.models.weights.pushed._GATHERED_BYTES", 1)
    model, gathered = load_model(settings_of(folder_of("GPTNeoXConfig", tmp_path))), []

    def gather(tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
        gathered.extend(tensors)
        return nullcontext()

    pushed = PushedWeights(
        model, gather, lambda tensor: tuple(tensor.shape), dtype="float32", bucket_bytes=BUCKET_BYTES
    )
    buckets = pushed.buckets(is_sender=True)
    next(next(buckets))
    assert len(gathered) == 1
    next(buckets)
    # What was not taken of the first bucket came together too: the other ranks know nothing of who takes what.
    assert len(gathered) == len(pushed.plan[0]) > 1
