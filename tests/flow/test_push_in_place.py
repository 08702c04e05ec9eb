"""Pushes into a vLLM engine that has no second copy of its weights: it stands still, and what breaks is not served."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest
import pytest_asyncio
import torch
from torch import nn
from transformers import Qwen2ForCausalLM

from learner.weights.push import WeightPusher
from protocol.weights.digest import WeightDigest
from protocol.weights.wire import TensorMeta, update_message
from rollout.engine.engine import Engine
from tests.fakes.in_process_server import InProcessServer
from tests.fakes.planned_weights import plan_buckets
from tests.fakes.tiny_models import engine_of, make_tiny_model
from tests.flow.pushed_pair import Pair, worst_difference

pytestmark = [
    pytest.mark.stack,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    torch.manual_seed(0)
    folder = make_tiny_model(tmp_path_factory.mktemp("model"), tied=True)
    engine = await Engine.start(engine_of(folder, second_copy=False))
    server = InProcessServer("sluice-rollout-0", engine)
    pusher = WeightPusher([server], "127.0.0.1", "gloo", deadline_s=20.0)
    yield Pair(Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32), engine, server, pusher)
    await asyncio.to_thread(pusher.close)
    engine.shutdown()


async def test_logprobs_are_the_learners_after_a_push_and_requests_in_flight_go_on(pair: Pair) -> None:
    await pair.push()
    in_flight = [asyncio.create_task(pair.generate(index, 200)) for index in range(4)]
    await pair.generate(4, 8)  # the others have about as many tokens by then
    pair.step()
    report = await pair.push()
    generations = await asyncio.gather(*in_flight)

    assert report.synced == ("sluice-rollout-0",)
    assert report.pause_s > 0.0
    assert {generation.finish_reason for generation in generations} <= {"length", "stop"}
    assert {version for generation in generations for *_, version in generation.version_spans} == {1, 2}
    assert worst_difference(pair.learner, await pair.generate(5, 32)) < 1e-4


async def test_requests_in_flight_outlast_a_sleep_in_which_weights_came_and_what_they_cached_is_computed_again(
    pair: Pair,
) -> None:
    await pair.push()
    in_flight = [asyncio.create_task(pair.generate(index, 200)) for index in range(4)]
    await pair.generate(4, 8)  # the others have about as many tokens by then
    await pair.engine.sleep()
    await pair.engine.sleep()  # a second call changes nothing
    pair.step()
    report = await pair.push()
    asleep = pair.engine.stats
    await asyncio.sleep(0.2)
    still = pair.engine.stats
    await pair.engine.wake()
    generations = await asyncio.gather(*in_flight)

    assert report.synced == ("sluice-rollout-0",)
    assert (asleep.is_paused, still.is_paused, pair.engine.stats.is_paused) == (True, True, False)
    assert {generation.finish_reason for generation in generations} <= {"length", "stop"}
    resumed = [generation for generation in generations if generation.version_spans[-1][-1] == pair.version]
    assert asleep.num_in_flight == still.num_in_flight == len(resumed)  # others had ended before
    for generation in resumed:
        start, end, _ = generation.version_spans[-1]
        if end > start + 1:
            # Of the new weights, and of nothing that was cached under the old ones.
            assert worst_difference(pair.learner, generation, start + 1, end) < 1e-4
    assert worst_difference(pair.learner, await pair.generate(5, 32)) < 1e-4


async def test_an_engine_that_slept_without_a_push_goes_on_with_the_weights_it_had(pair: Pair) -> None:
    await pair.push()
    in_flight = asyncio.create_task(pair.generate(6, 60))
    await pair.engine.sleep()
    await pair.engine.wake()
    generation = await in_flight

    assert {version for *_, version in generation.version_spans} == {pair.version}
    assert worst_difference(pair.learner, generation) < 1e-4


class ThreeParts(nn.Module):
    """A layer of parts that come one by one, as an attention's q, k and v do, in a model that loads as vLLM's do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Module()
        for name, num_elements in (("q", 5), ("k", 4), ("v", 4)):
            self.layer.register_parameter(name, nn.Parameter(torch.zeros(num_elements)))

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> set[str]:
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader  # importing it warns

        parameters = dict(self.named_parameters())
        for name, weight in weights:
            getattr(parameters[name], "weight_loader", default_weight_loader)(parameters[name], weight)
        return {name for name, _ in weights}


def test_a_push_after_one_that_broke_within_a_layer_is_loaded_whole() -> None:
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    from rollout.engine.weights.receive import InPlaceLoad, WeightUpdate

    model = ThreeParts()
    record_metadata_for_reloading(model)
    load, config = InPlaceLoad(), SimpleNamespace(dtype=torch.float32)
    sizes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    plan = plan_buckets([TensorMeta(name, "float32", size) for name, size in sizes.items()], 32)
    assert [[meta.name for meta in bucket] for bucket in plan] == [["layer.q"], ["layer.k", "layer.v"]]

    def pushed(value: float, num_buckets: int) -> str:
        digest = WeightDigest(plan)

        def broadcast(flat: torch.Tensor) -> None:
            nonlocal num_buckets
            if not num_buckets:
                raise RuntimeError("the learner failed")
            num_buckets -= 1
            flat.view(torch.float32).fill_(value)
            digest.add(flat)

        load.begin(model, config)
        load.take(WeightUpdate(message=update_message(plan)), "cpu", broadcast)
        return digest.hexdigest()

    with pytest.raises(RuntimeError, match="the learner failed"):
        pushed(1.0, 1)
    sent = pushed(2.0, 2)
    load.take(WeightUpdate(expected_digest=sent), "cpu", lambda flat: None)
    load.end()
    assert {float(element) for parameter in model.parameters() for element in parameter} == {2.0}
