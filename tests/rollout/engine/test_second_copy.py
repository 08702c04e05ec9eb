"""A push is loaded beside the weights in use: on vLLM's own layerwise reload, with layers that keep packed weights."""

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from protocol.weights.wire import Bucket, TensorMeta, bucket_num_bytes, bucket_views
from tests.fakes.planned_weights import plan_buckets

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")

CONFIG = SimpleNamespace(dtype=torch.float32)
NAMES = ("embedding.weight", "first.weight", "second.weight")


class Packed(nn.Module):
    """A linear layer that keeps its weights packed once they are loaded, as vLLM's do on CPUs."""

    def __init__(self) -> None:
        from vllm.model_executor.layers.linear import UnquantizedLinearMethod  # importing it warns

        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4), requires_grad=False)
        self.quant_method: Any = UnquantizedLinearMethod()


class Model(nn.Module):
    """Two layers that are packed, an embedding, a head that is tied to it, and a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(4, 4), nn.Linear(4, 4, bias=False)
        self.head.weight = self.embedding.weight
        self.first, self.second = Packed(), Packed()
        self.register_buffer("flat", self.embedding.weight.data.view(-1), persistent=False)  # as a Mamba layer has
        self.register_buffer("num_seen", torch.zeros(()))
        self.last_seen = 0

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> set[str]:
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        parameters = dict(self.named_parameters())
        for name, weight in weights:
            getattr(parameters[name], "weight_loader", default_weight_loader)(parameters[name], weight)
        return {name for name, _ in weights}

    def held(self) -> list[float]:
        """Return what each of its layers computes with: of one value each."""
        row, no_bias = torch.tensor([[1.0, 0.0, 0.0, 0.0]]), None
        packed = [layer.cpu_linear(row, layer.weight, no_bias)[0, 0] for layer in (self.first, self.second)]  # type: ignore[operator]
        plain = (self.embedding.weight[0, 0], self.head.weight[3, 3], self.get_buffer("flat")[5])
        return [float(value) for value in (*plain, *packed)]


@pytest.fixture
def model() -> Model:
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    model = Model()
    record_metadata_for_reloading(model)
    for layer in (model.first, model.second):
        layer.quant_method.process_weights_after_loading(layer)
    return model


def _plan(*names: str) -> tuple[Bucket, ...]:
    return plan_buckets([TensorMeta(name, "float32", (4, 4)) for name in names], 64)


def _came(model: nn.Module, value: float, plan: tuple[Bucket, ...]) -> Any:
    """Return a second copy that took a push of this value."""
    from rollout.engine.weights.second_copy import ReadyCopy

    copy = ReadyCopy(model, CONFIG)
    for bucket in plan:
        flat = torch.empty(bucket_num_bytes(bucket), dtype=torch.uint8)
        for _, view in bucket_views(flat, bucket):
            view.fill_(value)
        copy.take(bucket, flat)
    copy.complete()
    return copy


def test_weights_in_use_are_the_earlier_ones_until_the_copy_is_put_to_use(model: Model) -> None:
    for value in (1.0, 2.0, 3.0):
        before, embedding = model.held(), model.embedding.weight
        copy = _came(model, value, _plan(*NAMES))
        assert model.held() == before
        copy.put_to_use()
        copy.drop()
        assert model.held() == [value] * 5
        assert model.embedding.weight is model.head.weight is embedding


def test_what_changed_in_use_while_the_push_came_stays(model: Model) -> None:
    copy = _came(model, 1.0, _plan(*NAMES))
    model.get_buffer("num_seen").add_(7)
    model.last_seen = 3
    copy.put_to_use()
    copy.drop()
    assert (model.held(), float(model.get_buffer("num_seen")), model.last_seen) == ([1.0] * 5, 7.0, 3)


def test_a_copy_that_is_dropped_leaves_the_weights_and_the_next_push_alone(model: Model) -> None:
    _came(model, 1.0, _plan(*NAMES)).put_to_use()
    _came(model, 5.0, _plan(*NAMES[:2])).drop()  # broke off
    assert model.held() == [1.0] * 5
    _came(model, 2.0, _plan(*NAMES)).put_to_use()
    assert model.held() == [2.0] * 5


def test_what_is_missing_or_refused_is_told_when_it_is_put_to_use_and_changes_nothing(model: Model) -> None:
    _came(model, 1.0, _plan(*NAMES)).put_to_use()
    lacking = _came(model, 2.0, _plan(*NAMES[:2]))
    with pytest.raises(ValueError, match=r"lacks 1 parameters of the model, first \['second.weight'\]"):
        lacking.put_to_use()
    strange = _came(model, 2.0, _plan(NAMES[0], "unknown.weight", *NAMES[1:]))
    with pytest.raises(KeyError, match=r"unknown.weight"):
        strange.put_to_use()
    assert model.held() == [1.0] * 5


def test_dropping_gives_the_memory_back_without_the_collector(model: Model) -> None:
    from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

    _came(model, 1.0, _plan(*NAMES)).put_to_use()
    gc.collect()
    gc.disable()
    try:
        num_known = len(LAYERWISE_INFO)
        taken, put = _came(model, 2.0, _plan(*NAMES)), _came(model, 3.0, _plan(*NAMES))
        kept = [copy._twin.model.embedding.weight for copy in (taken, put)]
        put.put_to_use()
        for copy in (taken, put):
            copy.drop()
        assert len(LAYERWISE_INFO) == num_known
        assert all(len(gc.get_referrers(tensor)) == 1 for tensor in kept)  # the list alone
    finally:
        gc.enable()


def test_the_bytes_are_kept_of_small_models_and_where_layers_share_what_loading_makes(model: Model) -> None:
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    from rollout.engine.weights.second_copy import BytesCopy, second_copy

    class Quantised(UnquantizedLinearMethod):  # whatever vLLM brings besides the two kinds that we know
        pass

    large = plan_buckets([TensorMeta("embedding.weight", "float32", (4096, 4096))], 1 << 30)
    model.first.quant_method = Quantised()
    assert isinstance(second_copy(model, CONFIG, large), BytesCopy)
    model.first.quant_method = None
    assert not isinstance(second_copy(model, CONFIG, large), BytesCopy)
    assert isinstance(second_copy(model, CONFIG, _plan(*NAMES)), BytesCopy)  # small: quicker in a pause
    model.first.register_buffer("elsewhere", torch.zeros(1, device="meta"))
    assert isinstance(second_copy(model, CONFIG, large), BytesCopy)
