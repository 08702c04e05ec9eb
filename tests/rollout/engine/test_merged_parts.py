"""Which parts of merged parameters a push lacks, on vLLM's own layers and its own loading of them."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")

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

    from rollout.engine.weights.merged_parts import lacking_parts

    alone = SimpleNamespace(world_size=1, rank_in_group=0)
    monkeypatch.setattr("vllm.distributed.parallel_state._TP", alone)

    def lacking(names: Sequence[str]) -> set[str]:
        with set_current_vllm_config(VllmConfig()):
            model = SeesAndWrites()
        record_metadata_for_reloading(model)
        initialize_layerwise_reload(model)
        model.load_weights(names)
        found = lacking_parts(model, names)
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

    from rollout.engine.weights.merged_parts import lacking_parts

    mixture: Any = RoutedExperts.__new__(RoutedExperts)
    nn.Module.__init__(mixture)
    mixture.moe_config = SimpleNamespace(num_logical_experts=8)
    kinds = ("gate_proj", "up_proj", "down_proj")
    names = [f"model.layers.0.mlp.experts.{number}.{kind}.weight" for number in range(8) for kind in kinds]
    names += [f"model.layers.0.self_attn.v_experts.{number}.weight" for number in range(4)]

    found = lacking_parts(nn.ModuleList([mixture]), [name for name in names if name != lacking])
    assert found == ({lacking} if lacking else set())
