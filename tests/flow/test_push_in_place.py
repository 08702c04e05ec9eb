"""Pushes into a vLLM engine that has no second copy of its weights: it stands still, and what breaks is not served."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import torch
from transformers import Qwen2ForCausalLM

from learner.weights.push import WeightPusher
from rollout.engine.engine import Engine
from tests.fakes.in_process_server import InProcessServer
from tests.fakes.planned_weights import Gathered, planned
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


async def test_a_push_after_one_that_broke_midway_is_loaded_whole(pair: Pair) -> None:
    pair.step()
    # Cut so that the break falls between the parts of one layer of vLLM's: it has q, k and v as one.
    plan, gathered = planned(pair.learner.named_parameters(), 1 << 16)

    def gather() -> Gathered:
        for bucket in gathered:
            yield bucket
            if any("0.self_attn.q_proj.weight" in name for name, _ in bucket):
                raise RuntimeError("the learner failed")

    with pytest.raises(RuntimeError, match="the learner failed"):
        await asyncio.to_thread(pair.pusher.push, 90, plan, gather())
    held = pair.engine.policy_version
    pair.step()
    report = await pair.push()
    while not report.synced:  # it joins anew in the background
        await asyncio.sleep(0.05)
        report = await pair.push()

    assert held is None
    assert worst_difference(pair.learner, await pair.generate(6, 32)) < 1e-4
