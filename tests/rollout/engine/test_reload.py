"""Reloading weights with vLLM's own layerwise reload: packed layers, tied heads, and parameters that a push lacks."""

import logging
import secrets
from contextlib import closing, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from protocol.weights.group import PeerLostError, in_thread
from protocol.weights.same_machine import SameMachineGroup, card_address, listen_here
from protocol.weights.wire import TensorMeta, bucket_num_bytes, update_message
from tests.fakes.planned_weights import bucket_views, plan_buckets

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
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging

    configure_logging(LoggingConfig())  # as each engine does at its start
    log = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    embedding = receiver.model.embedding.weight
    for value in (1.0, 2.0, 3.0):
        receiver.load_received(_buckets(value, *NAMES))
        assert receiver.model.held() == [value] * 5
        assert log.getEffectiveLevel() > logging.WARNING  # vLLM warns of a tied head at every push
        assert receiver.model.embedding.weight is receiver.model.head.weight is embedding


def test_push_that_lacks_a_parameter_or_names_an_unknown_one_is_refused_and_the_next_one_loads(receiver: Any) -> None:
    with pytest.raises(ValueError, match=r"lacks 1 parameters of the model, first \['second.weight'\]"):
        receiver.load_received(_buckets(2.0, *NAMES[:2]))
    with pytest.raises(KeyError, match=r"unknown.weight"):
        receiver.load_received(_buckets(2.0, NAMES[0], "unknown.weight", *NAMES[1:]))
    receiver.load_received(_buckets(3.0, *NAMES))
    assert receiver.model.held() == [3.0] * 5


def test_first_push_names_tensors_that_the_model_has_no_parameter_for(receiver: Any) -> None:
    load_all = receiver.model.load_weights
    receiver.model.load_weights = lambda weights: load_all([pair for pair in weights if pair[0] in NAMES])  # as Qwen3's
    biases = [f"layers.{number}.o_proj.bias" for number in range(3)]
    for _ in range(2):  # each push finds it
        with pytest.raises(
            ValueError, match=r"no parameter for \['layers.2.o_proj.bias'\] and would compute without it"
        ):
            receiver.load_received(_buckets(2.0, *NAMES, *biases))
    receiver.load_received(_buckets(3.0, *NAMES))
    assert receiver.model.held() == [3.0] * 5


def test_worker_that_cannot_load_a_bucket_leaves_the_rank_on_its_card_at_once(receiver: Any) -> None:
    from rollout.engine.weights.receive import SameMachineEngine, SameMachineInit, WeightUpdate

    config = SimpleNamespace(parallel_config=receiver.parallel_config, model_config=receiver.model_config)
    engine = SameMachineEngine(None, config, torch.device("cpu"), receiver.model)
    plan = [bucket for bucket, _ in _buckets(1.0, "unknown.weight", "other.weight")]
    name, patience_s = secrets.token_hex(8), 30.0

    def send() -> None:
        _, rank = SameMachineGroup.admit(listener, patience_s)
        with closing(rank):
            rank.welcome()
            for bucket in plan:
                rank.broadcast(torch.zeros(bucket_num_bytes(bucket), dtype=torch.uint8))

    with listen_here(card_address(name, 0)) as listener:
        sending = in_thread("rank", send)
        engine.init_transfer_engine(SameMachineInit(name, patience_s, "server"))
        engine.start_weight_update()
        with pytest.raises(KeyError, match=r"unknown.weight"):
            engine.receive_weights(WeightUpdate(update_message(plan)))
        with pytest.raises(PeerLostError):
            sending.result(patience_s / 2)


@pytest.mark.parametrize("is_cpu", [True, False])
def test_only_a_cpu_drops_the_experts_kernel_before_a_push(is_cpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    from rollout.engine.weights import reload

    monkeypatch.setattr(reload, "current_platform", SimpleNamespace(is_cpu=lambda: is_cpu))
    method = UnquantizedFusedMoEMethod.__new__(UnquantizedFusedMoEMethod)
    nn.Module.__init__(method)
    method.moe_kernel = kernel = object()  # a GPU's captured graphs point to it
    experts = nn.Module()
    experts.quant_method = method
    reload.drop_expert_kernels(nn.Sequential(experts))
    assert method.moe_kernel is (None if is_cpu else kernel)


@pytest.mark.parametrize("scoring", ["softmax", "softmax in groups", "softmax without a bias", "sigmoid in groups"])
def test_push_to_a_mixture_whose_bias_vllm_ignores_on_cpus_is_refused(receiver: Any, scoring: str) -> None:
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    function, _, form = scoring.partition(" ")
    bias = None if form == "without a bias" else torch.zeros(4)
    groups = {"use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1} if form == "in groups" else {}
    receiver.model.first.router = CPURouter(2, 4, scoring_func=function, e_score_correction_bias=bias, **groups)
    with pytest.raises(ValueError, match=r"computes first without the bias") if not form else nullcontext():
        receiver.load_received(_buckets(2.0, *NAMES))


def test_a_worker_takes_its_shard_of_neighbouring_experts_in_one_call() -> None:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    from rollout.engine.weights.reload import _run_loader, _Stack

    class Layer:
        """The second of two workers: experts of 6 x 3 in three parts of 2 x 3 of the first weight."""

        moe_config = SimpleNamespace(
            tp_size=2, tp_rank=1, is_act_and_mul=True, moe_parallel_config=SimpleNamespace(tp_size=2)
        )
        _load_w13, _load_w2 = RoutedExperts._load_w13, RoutedExperts._load_w2
        _get_hidden_dim = staticmethod(RoutedExperts._get_hidden_dim)
        _narrow_expert_data_for_padding = staticmethod(RoutedExperts._narrow_expert_data_for_padding)

    layer: Any = Layer()
    calls = []
    for attribute, shape in (("w13_weight", (4, 4, 3)), ("w2_weight", (4, 3, 2))):
        parameter = nn.Parameter(torch.zeros(shape), requires_grad=False)
        setattr(layer, attribute, parameter)
        load = _run_loader(layer)
        parameter.weight_loader = lambda *given, load=load: (calls.append(given[-1]), load(*given))  # type: ignore[attr-defined]
    given = {shard: torch.randn(4, *((3, 4) if shard == "w2" else (4, 3))) for shard in ("w1", "w2", "w3")}
    for shard, experts in given.items():
        stack = _Stack(layer, "w2_weight" if shard == "w2" else "w13_weight", "name", shard)
        assert stack.load(experts[:2], 0) == stack.load(experts[3:], 3) == "name"

    assert calls == [0, 3] * 3
    for number in (0, 1, 3):
        assert torch.equal(layer.w13_weight[number], torch.cat([given["w1"][number, 2:], given["w3"][number, 2:]]))
        assert torch.equal(layer.w2_weight[number], given["w2"][number, :, 2:])
    assert not layer.w13_weight[2].any()
