"""Reloading weights with vLLM's own layerwise reload: packed layers, tied heads, and parts that a push lacks."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from protocol.weights.wire import TensorMeta, bucket_num_bytes, bucket_views
from tests.fakes.planned_weights import plan_buckets

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")

NAMES = ("embedding.weight", "first.weight", "second.weight")


class Packed(nn.Module):
    """A linear layer that packs its weights after loading, as vLLM's do on CPUs."""

    def __init__(self) -> None:
        from vllm.model_executor.layers.linear import UnquantizedLinearMethod  # importing it warns

        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4), requires_grad=False)
        self.quant_method: Any = UnquantizedLinearMethod()


class PackedModel(nn.Module):
    """Two packed layers, an embedding, a tied head, and a buffer that is a view of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(4, 4), nn.Linear(4, 4, bias=False)
        self.head.weight = self.embedding.weight
        self.first, self.second = Packed(), Packed()
        self.register_buffer("flat", self.embedding.weight.data.view(-1), persistent=False)  # as a Mamba layer has

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> set[str]:
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        parameters = dict(self.named_parameters())
        for name, weight in weights:
            getattr(parameters[name], "weight_loader", default_weight_loader)(parameters[name], weight)
        return {name for name, _ in weights}

    def held(self) -> list[float]:
        """Return one value that each layer computes with."""
        row, no_bias = torch.tensor([[1.0, 0.0, 0.0, 0.0]]), None
        packed = [layer.cpu_linear(row, layer.weight, no_bias)[0, 0] for layer in (self.first, self.second)]  # type: ignore[operator]
        plain = (self.embedding.weight[0, 0], self.head.weight[3, 3], self.get_buffer("flat")[5])
        return [float(value) for value in (*plain, *packed)]


@pytest.fixture
def receiver() -> Any:
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    from rollout.engine.weights.receive import GlooWeightEngine

    model = PackedModel()
    record_metadata_for_reloading(model)
    for layer in (model.first, model.second):
        layer.quant_method.process_weights_after_loading(layer)
    config = SimpleNamespace(parallel_config=SimpleNamespace(rank=0), model_config=SimpleNamespace(dtype=torch.float32))
    return GlooWeightEngine(None, config, torch.device("cpu"), model)


def _buckets(value: float, *names: str) -> list[Any]:
    buckets = []
    for bucket in plan_buckets([TensorMeta(name, "float32", (4, 4)) for name in names], 64):
        flat = torch.empty(bucket_num_bytes(bucket), dtype=torch.uint8)
        for _, view in bucket_views(flat, bucket):
            view.fill_(value)
        buckets.append((bucket, flat))
    return buckets


def test_each_push_replaces_packed_and_tied_weights_and_views_in_place(receiver: Any) -> None:
    embedding = receiver.model.embedding.weight
    for value in (1.0, 2.0, 3.0):
        receiver.load_received(_buckets(value, *NAMES))
        assert receiver.model.held() == [value] * 5
        assert receiver.model.embedding.weight is receiver.model.head.weight is embedding


def test_push_that_lacks_a_parameter_or_names_an_unknown_one_is_refused_and_the_next_one_loads(receiver: Any) -> None:
    with pytest.raises(ValueError, match=r"lacks 1 parameters of the model, first \['second.weight'\]"):
        receiver.load_received(_buckets(2.0, *NAMES[:2]))
    with pytest.raises(KeyError, match=r"unknown.weight"):
        receiver.load_received(_buckets(2.0, NAMES[0], "unknown.weight", *NAMES[1:]))
    receiver.load_received(_buckets(3.0, *NAMES))
    assert receiver.model.held() == [3.0] * 5


PARTS = {"q_proj": "q", "k_proj": "k", "v_proj": "v"}
TOWER, LANGUAGE = "vision_tower.encoder.layers.0.self_attn", "language_model.model.layers.0.self_attn"


class SeesAndWrites(nn.Module):
    """Attention of a tower that sees, and of a language model, in layers of the same number."""

    packed_modules_mapping: ClassVar = {"qkv_proj": list(PARTS)}

    def __init__(self) -> None:
        from vllm.model_executor.layers.linear import QKVParallelLinear  # importing it warns

        super().__init__()
        for place in (TOWER, LANGUAGE):
            layer: nn.Module = self
            for name in place.split("."):
                layer.add_module(name, inner := nn.Module())
                layer = inner
            layer.qkv_proj = QKVParallelLinear(8, 4, 2, bias=False, disable_tp=True)
            layer.qkv_proj.quant_method = None  # which would pack the weights for the CPU

    def load_weights(self, names: Sequence[str]) -> None:
        for name in names:
            place, part, _ = name.rsplit(".", 2)
            weight = self.get_submodule(f"{place}.qkv_proj").weight
            weight.weight_loader(weight, torch.ones(8, 8), PARTS[part])


@pytest.fixture
def lacking_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[str]], set[str]]:
    """Return what vLLM's layers lack after a push of these names."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
        record_metadata_for_reloading,
    )

    from rollout.engine.weights.reload import missing_parts

    alone = SimpleNamespace(world_size=1, rank_in_group=0)
    monkeypatch.setattr("vllm.distributed.parallel_state._TP", alone)

    def lacking(names: Sequence[str]) -> set[str]:
        with set_current_vllm_config(VllmConfig()):
            model = SeesAndWrites()
        record_metadata_for_reloading(model)
        initialize_layerwise_reload(model)
        model.load_weights(names)
        found = missing_parts(model, names)
        finalize_layerwise_reload(model, SimpleNamespace(dtype=torch.float32))  # type: ignore[arg-type]
        return found

    return lacking


@pytest.mark.parametrize("place", [TOWER, LANGUAGE])
@pytest.mark.parametrize("part", PARTS)
def test_a_part_is_missed_that_another_tower_has_under_the_same_ending(
    place: str, part: str, lacking_after: Callable[[Sequence[str]], set[str]]
) -> None:
    names = [f"{each}.{name}.weight" for each in (TOWER, LANGUAGE) for name in PARTS]
    lacking = f"{place}.{part}.weight"

    assert lacking_after([name for name in names if name != lacking]) == {lacking}
    assert lacking_after(names) == set()


@pytest.mark.parametrize("lacking", [None, "model.layers.0.mlp.experts.5.up_proj.weight"])
def test_other_numbered_experts_than_a_mixtures_are_not_counted_as_its(lacking: str | None) -> None:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    from rollout.engine.weights.reload import missing_parts

    mixture: Any = RoutedExperts.__new__(RoutedExperts)
    nn.Module.__init__(mixture)
    mixture.moe_config = SimpleNamespace(num_logical_experts=8)
    kinds = ("gate_proj", "up_proj", "down_proj")
    names = [f"model.layers.0.mlp.experts.{number}.{kind}.weight" for number in range(8) for kind in kinds]
    names += [f"model.layers.0.self_attn.v_experts.{number}.weight" for number in range(4)]

    found = missing_parts(nn.ModuleList([mixture]), [name for name in names if name != lacking])
    assert found == ({lacking} if lacking else set())
