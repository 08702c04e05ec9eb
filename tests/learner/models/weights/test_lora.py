"""Adapters in a real tiny model: alone trained, merged in pushes and folders, off for the reference, read by peft."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM

from learner.models.gradient import score_tokens
from learner.models.micro_batch import LearnerSample, make_micro_batch
from learner.models.model_loading import load_model
from learner.models.parked import ParkedModels
from learner.models.reference import ReferenceModel
from learner.models.weights.export import export_model
from learner.models.weights.lora import LoraForm, adapted_layers, adapters_off, add_adapters, write_adapters
from learner.models.weights.pushed import PushedWeights, Weight, weights_of
from learner.models.world import join_world
from protocol.errors import OperatorError
from tests.benchmarks.packing_table import OneProcess, settings_of
from tests.fakes.ports import free_port
from tests.fakes.tiny_models import make_tiny_mixture, make_tiny_model

FORM = LoraForm(rank=4, alpha=8.0, targets=("q_proj", "down_proj"))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "source", tied=True, hidden_size=64)


@pytest.fixture
def world() -> Iterator[None]:
    """A world of one rank."""
    join_world(0, 1, "127.0.0.1", free_port(), 60.0)
    yield
    dist.destroy_process_group()


def adapted(source: Path, form: LoraForm = FORM) -> Any:
    """Return the model with adapters that were trained: their product is not zero."""
    torch.manual_seed(1)
    model = load_model(replace(settings_of(source), lora=form))
    for name, parameter in model.named_parameters():
        if ".lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


@torch.no_grad()
def logprobs(model: Any) -> Tensor:
    tokens = np.random.default_rng(0).integers(0, 262, 20).astype(np.int32)
    sample = LearnerSample(tokens, np.arange(20) > 0, np.zeros(20, np.float32))
    return score_tokens(OneProcess(model), make_micro_batch([sample]), 1.0, with_entropy=False)[0]


def test_adapters_alone_are_trained_and_begin_as_nothing(source: Path) -> None:
    plain, model = load_model(settings_of(source)), load_model(replace(settings_of(source), lora=FORM))
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 2 * 2  # two factors of two layers in each of two blocks
    assert all(".lora_" in name for name in trained)
    torch.testing.assert_close(logprobs(model), logprobs(plain))


def test_reference_is_the_base_with_adapters_off_and_they_are_on_again_after(source: Path) -> None:
    model = adapted(source)
    with_them = logprobs(model)
    with adapters_off(model):
        torch.testing.assert_close(logprobs(model), logprobs(load_model(settings_of(source))))
    assert torch.equal(logprobs(model), with_them)
    assert float((with_them - logprobs(load_model(settings_of(source)))).abs().max()) > 0.1
    assert all(parameter.requires_grad == (".lora_" in name) for name, parameter in model.named_parameters())


def test_push_has_the_names_of_the_model_folder_and_adapters_merged(source: Path, tmp_path: Path) -> None:
    model = adapted(source)
    pushed = PushedWeights(model, nullcontext, lambda tensor: tuple(tensor.shape), dtype="float32", bucket_bytes=50_000)
    merged = dict(pushed.tensors(is_sender=True))
    plain = load_model(settings_of(source))
    assert merged.keys() == dict(plain.named_parameters()).keys()
    plain.load_state_dict(merged, strict=False)
    torch.testing.assert_close(logprobs(plain), logprobs(model), rtol=0, atol=1e-4)


@pytest.mark.parametrize("size", [1e-4, 1e-2, 1.0])
def test_a_change_below_a_step_of_bfloat16_reaches_merged_weights(size: float) -> None:
    torch.manual_seed(0)
    base, a, b = (0.02 * torch.randn(512, 256)).bfloat16(), torch.randn(4, 256), 1e-3 * size * torch.randn(512, 4)
    weight = Weight("w", (base, a, b), scale=2.0)
    change = 2.0 * (b @ a)
    merged = weight.merge()
    pushed = merged.float() - base.float()
    assert float((pushed * change).sum() / change.square().sum()) == pytest.approx(
        1.0, abs=0.15 if size < 1e-3 else 0.02
    )
    assert torch.equal(merged, weight.merge())
    step = 2.0 ** (torch.floor(torch.log2(merged.float().abs())) - 7)
    assert bool(((merged.float() - base.float() - change).abs() <= step).all())


def test_adapters_that_are_nothing_leave_the_base_as_it_is() -> None:
    base = torch.randn(64, 32).bfloat16()
    assert torch.equal(Weight("w", (base, torch.randn(4, 32), torch.zeros(64, 4)), scale=2.0).merge(), base)


def test_exported_folder_has_adapters_merged(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "barrier", lambda: None)
    model = adapted(source)
    export_model(tmp_path / "export", source, model, lambda tensors: nullcontext(), Tensor.numel)
    exported = load_model(settings_of(tmp_path / "export"))
    torch.testing.assert_close(logprobs(exported), logprobs(model), rtol=0, atol=1e-4)


@pytest.mark.parametrize("form", [FORM, LoraForm(rank=2, alpha=2.0, targets=())])
def test_peft_loads_written_adapters_onto_the_base(source: Path, tmp_path: Path, form: LoraForm) -> None:
    from peft import PeftModel

    model = adapted(source, form)
    tensors = {name: tensor.detach().clone() for name, tensor in model.named_parameters() if ".lora_" in name}
    write_adapters(tmp_path / "adapter", form, str(source), tensors)
    loaded: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(source), str(tmp_path / "adapter"))
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 262, 20))[None]
    found = loaded(input_ids=tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
    torch.testing.assert_close(found.detach(), logprobs(model), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("GPT2Config", r"\[\] \(all linear layers but the head: none\) cannot be adapted: it has no linear layer but"),
        (
            "MambaConfig",
            r"in_proj, out_proj, x_proj\) cannot .* are called dt_proj, in_proj, lm_head, out_proj",
        ),
    ],
)
def test_model_whose_default_targets_cannot_be_adapted_is_refused_with_its_layers(config: str, expected: str) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    small = getattr(transformers, config)(vocab_size=64, bos_token_id=1, eos_token_id=2, **sizes)
    with pytest.raises(OperatorError, match=expected):
        add_adapters(transformers.AutoModelForCausalLM.from_config(small), LoraForm(4, 4.0, ()))


def test_targets_that_are_not_there_are_refused_with_those_that_are(source: Path) -> None:
    expected = (
        r"policy\.lora\.targets = \['q_proj', 'query'\] cannot be adapted: no layer is called query\. This "
        r"model's linear layers are called down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj\."
    )
    with pytest.raises(OperatorError, match=expected):
        load_model(replace(settings_of(source), lora=LoraForm(2, 2.0, ("q_proj", "query"))))


def test_mixture_has_adapters_on_its_linear_layers_and_is_pushed_by_the_names_of_its_folder(tmp_path: Path) -> None:
    source = make_tiny_mixture(tmp_path / "mixture")
    model = adapted(source, LoraForm(rank=2, alpha=2.0, targets=()))
    assert {name.rpartition(".")[2] for name in adapted_layers(model)} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    pushed = PushedWeights(
        model, nullcontext, lambda tensor: tuple(tensor.shape), dtype="float32", bucket_bytes=1 << 20
    )
    with safe_open(source / "model.safetensors", framework="pt") as file:
        assert {meta.name for bucket in pushed.plan for meta in bucket} == set(file.keys())


def test_router_of_a_mixture_is_refused_as_a_target(tmp_path: Path) -> None:
    source = make_tiny_mixture(tmp_path / "mixture")
    expected = r"policy\.lora\.targets = \['gate'\] cannot be adapted: model\.layers\.0\.mlp\.gate is not a linear"
    with pytest.raises(OperatorError, match=expected):
        load_model(replace(settings_of(source), lora=LoraForm(2, 2.0, ("gate",))))


def test_tied_head_is_refused_as_a_target_and_a_head_of_its_own_is_pushed_merged(source: Path, tmp_path: Path) -> None:
    form = LoraForm(rank=4, alpha=8.0, targets=("q_proj", "lm_head"))
    expected = r"cannot be adapted: lm_head has the weight of model\.embed_tokens\.weight, which would stay without"
    with pytest.raises(OperatorError, match=expected):
        load_model(replace(settings_of(source), lora=form))
    untied = make_tiny_model(tmp_path / "untied", tied=False, hidden_size=64)
    model, plain = adapted(untied, form), load_model(settings_of(untied))
    plain.load_state_dict({weight.name: weight.merge() for weight in weights_of(model)}, strict=False)
    torch.testing.assert_close(logprobs(plain), logprobs(model), rtol=0, atol=1e-4)


def test_reference_that_is_refreshed_becomes_the_policy_and_its_state_is_a_plain_model(
    source: Path, tmp_path: Path, world: None
) -> None:
    model = adapted(source)
    policy: Any = SimpleNamespace(merged_weights=lambda: weights_of(model), gather=lambda tensors: nullcontext())
    settings = replace(settings_of(source), lora=FORM)
    reference = ReferenceModel(settings, is_offloaded=False, is_kept=True)
    torch.testing.assert_close(logprobs(reference._model), logprobs(load_model(settings_of(source))))
    reference.refresh(policy)
    torch.testing.assert_close(logprobs(reference._model), logprobs(model), rtol=0, atol=1e-4)
    reference.save_state(tmp_path / "reference")
    again = ReferenceModel(settings, is_offloaded=False, is_kept=True)
    again.load_state(tmp_path / "reference")
    assert torch.equal(logprobs(again._model), logprobs(reference._model))
    again.refresh(policy)
    torch.testing.assert_close(logprobs(again._model), logprobs(model), rtol=0, atol=1e-4)


def test_a_parked_model_with_adapters_leaves_nothing_on_its_device(source: Path) -> None:
    model = adapted(source)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # a mapped file cannot be freed
    total = sum(parameter.nbytes for parameter in model.parameters())
    parked = ParkedModels([model], torch.device("cpu"))
    parked.park()
    left = sum(parameter.untyped_storage().nbytes() for parameter in model.parameters())
    num_parked = parked.num_bytes
    parked.restore()

    assert left == 0
    assert num_parked >= total


def test_parked_models_take_as_much_host_memory_as_they_have_bytes_and_take_it_once() -> None:
    parked = ParkedModels([torch.nn.Linear(100, 33)], torch.device("cpu"))
    places = set()
    for _ in range(2):
        parked.park()
        places.add((parked._memory.data_ptr(), len(parked._memory)))
        parked.restore()
    assert [size for _, size in places] == [4 * (100 * 33 + 33)]
