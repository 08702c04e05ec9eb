"""Weights pushed into a running vLLM engine: both sides compute the same logprobs, and every token knows its version.

The learner here is a plain transformers model in this process; the engine, the push and the wire are the real ones.
"""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import torch
from transformers import Qwen2ForCausalLM
from vllm.distributed.utils import StatelessProcessGroup

from learner.weights.push import WeightPusher
from protocol.errors import NeighbourError
from protocol.node.small_model_files import read_small_files
from protocol.weights.controls import Attempt
from protocol.weights.group import meet_as_first
from rollout.engine.engine import Engine
from rollout.engine.generation import Sampling
from tests.fakes.in_process_server import InProcessServer
from tests.fakes.planned_weights import Gathered, planned
from tests.fakes.tiny_models import engine_of, make_tiny_model
from tests.flow.pushed_pair import PROMPT, Pair, learner_logprobs, worst_difference

pytestmark = [
    pytest.mark.stack,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),
]

LONG_PROMPT = PROMPT * 17  # 306 tokens: vLLM caches prefixes in blocks of 128 on CPUs


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    """Yield a pair whose model has tied embeddings, which a push may leave half old; test_two_servers.py has untied."""
    torch.manual_seed(0)
    folder = make_tiny_model(tmp_path_factory.mktemp("model"), tied=True)
    without_weights = tmp_path_factory.mktemp("small_files")
    for name, content in read_small_files(folder, with_code=False).items():
        (without_weights / name).write_bytes(content)
    engine = await Engine.start(engine_of(without_weights))
    server = InProcessServer("sluice-rollout-0", engine)
    pusher = WeightPusher([server], "127.0.0.1", "gloo", deadline_s=20.0)
    pair = Pair(Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32), engine, server, pusher)
    with pytest.raises(NeighbourError, match="serves nothing"):
        await pair.generate(0, 8)
    await pair.push_as(0, pusher)
    yield pair
    await asyncio.to_thread(pusher.close)
    engine.shutdown()


async def test_logprobs_are_the_learners_after_the_first_push_to_an_engine_without_weights(pair: Pair) -> None:
    generation = await pair.generate(0, 48)

    assert worst_difference(pair.learner, generation) < 1e-4
    assert generation.version_spans == ((0, len(generation.tokens), 0),)


async def test_logprobs_are_the_learners_at_another_temperature(pair: Pair) -> None:
    generation = await pair.generate(1, 48, temperature=0.7)

    assert worst_difference(pair.learner, generation, temperature=0.7) < 1e-4


async def test_logprobs_differ_while_a_step_is_not_pushed_and_agree_after_it_is(pair: Pair) -> None:
    pair.step()
    stale = await pair.generate(2, 32)
    report = await pair.push()
    fresh = await pair.generate(3, 32)

    assert worst_difference(pair.learner, stale) > 0.1
    assert report.synced == ("sluice-rollout-0",)
    assert report.failed == {}
    assert worst_difference(pair.learner, fresh) < 1e-4
    assert fresh.version_spans == ((0, len(fresh.tokens), pair.version),)


async def test_requests_in_flight_go_on_through_a_push_with_exact_spans(pair: Pair) -> None:
    await pair.push()
    before = pair.version
    old_learner = Qwen2ForCausalLM(pair.learner.config)
    old_learner.load_state_dict(pair.learner.state_dict())
    in_flight = [asyncio.create_task(pair.generate(index, 300)) for index in range(16)]
    await pair.generate(16, 8)  # the others have about as many tokens by then
    pair.step()
    report = await pair.push()
    generations = await asyncio.gather(*in_flight)

    assert report.synced == ("sluice-rollout-0",)
    crossing = [generation for generation in generations if len(generation.version_spans) == 2]
    assert len(crossing) >= 4  # random models end some of the sixteen early
    for generation in crossing:
        (start, cut, old), (middle, end, new) = generation.version_spans
        assert (start, middle, end) == (0, cut, len(generation.tokens))
        assert (old, new) == (before, before + 1)
        # Tokens before the cut are exactly the old weights'; the first after it already saw new weights on old cache.
        assert worst_difference(old_learner, generation, 0, cut) < 1e-4
        assert worst_difference(old_learner, generation, cut, cut + 1) > 1e-4
    fresh = await pair.generate(99, 32)
    assert worst_difference(pair.learner, fresh) < 1e-4


async def test_generation_goes_on_until_the_last_bucket_has_come(pair: Pair) -> None:
    await pair.push()
    before, may_go_on = pair.version, threading.Event()
    pair.step()
    plan, gathered = planned(pair.learner.named_parameters(), 1 << 19)

    def gather() -> Gathered:
        yield next(gathered)
        yield next(gathered)
        may_go_on.wait(60.0)
        yield from gathered

    pair.version += 1
    pushing = asyncio.create_task(asyncio.to_thread(pair.pusher.push, pair.version, plan, gather()))
    while pair.engine._update is None:
        await asyncio.sleep(0.01)
    meanwhile = await pair.generate(20, 48)
    may_go_on.set()
    report = await pushing

    assert meanwhile.version_spans == ((0, len(meanwhile.tokens), before),)
    assert report.synced == ("sluice-rollout-0",)
    assert 0.0 < report.pause_s < report.push_s
    assert worst_difference(pair.learner, await pair.generate(21, 32)) < 1e-4


async def test_push_that_the_learner_breaks_off_leaves_the_earlier_weights_in_use(pair: Pair) -> None:
    await pair.push()
    old_learner = Qwen2ForCausalLM(pair.learner.config)
    old_learner.load_state_dict(pair.learner.state_dict())
    pair.step()
    plan, gathered = planned(pair.learner.named_parameters(), 1 << 19)

    def gather() -> Gathered:
        yield next(gathered)
        raise RuntimeError("the learner failed")

    with pytest.raises(RuntimeError, match="the learner failed"):
        await asyncio.to_thread(pair.pusher.push, pair.version + 1, plan, gather())
    after = await pair.generate(22, 32)
    again = await pair.push()
    while not again.synced:  # it joins anew in the background
        await asyncio.sleep(0.05)
        again = await pair.push()

    assert len(after.version_spans) == 1
    assert worst_difference(old_learner, after) < 1e-4
    assert worst_difference(pair.learner, await pair.generate(23, 32)) < 1e-4


async def test_commit_for_a_run_that_was_replaced_is_refused(pair: Pair) -> None:
    class ReplacedServer(InProcessServer):
        async def receive(self, attempt: Attempt) -> None:
            await super().receive(attempt)
            self._engine.forget_weights()

    pusher = WeightPusher([ReplacedServer("replaced", pair.engine)], "127.0.0.1", "gloo", deadline_s=20.0)
    report = await pair.push_as(88, pusher)
    await asyncio.to_thread(pusher.close)
    held = pair.engine.policy_version
    await asyncio.to_thread(pair.pusher.set_servers, [])
    await asyncio.to_thread(pair.pusher.set_servers, [pair.server])
    again = await pair.push()

    assert "cannot commit: nothing was received for the attached run" in report.failed["replaced"]
    assert held is None
    assert again.failed == {}


async def test_workers_of_vllm_meet_the_learners_half_of_nccls_rendezvous() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    learner = asyncio.to_thread(meet_as_first, listener, 3)
    workers = [asyncio.to_thread(StatelessProcessGroup.create, "127.0.0.1", port, rank, 3) for rank in (1, 2)]
    met = await asyncio.gather(learner, *workers)
    told = await asyncio.gather(
        *(asyncio.to_thread(group.broadcast_obj, "id" if group.rank == 0 else None, 0) for group in met)
    )

    assert told == ["id"] * 3
    assert listener.fileno() == -1  # the group has taken it over


async def test_prefix_that_other_weights_of_the_same_version_cached_is_not_reused(pair: Pair) -> None:
    differences = []
    for run in range(2):
        pair.engine.forget_weights()
        pair.step()
        await pair.push_as(1, pair.pusher)
        generation = await pair.engine.generate(LONG_PROMPT, Sampling(8, 1.0), f"run-{run}")
        differences.append(worst_difference(pair.learner, generation, prompt=LONG_PROMPT))

    assert max(differences) < 1e-4


async def test_probe_gives_the_learners_logprobs_of_fixed_tokens(pair: Pair) -> None:
    pair.step()
    await pair.push()
    logprobs: list[float] = []
    await asyncio.to_thread(pair.pusher.verify, pair.version, PROMPT, lambda name, found: logprobs.extend(found))

    expected = learner_logprobs(pair.learner, PROMPT, 1.0)
    difference = torch.tensor(logprobs) - expected
    assert difference.abs().max().item() < 1e-4


async def test_a_wrong_digest_is_refused_and_nothing_is_served_until_the_next_push(pair: Pair) -> None:
    class LyingServer(InProcessServer):
        async def commit(self, attempt: Attempt, version: int, digest: str) -> float:
            return await super().commit(attempt, version, "0" * 64)

    liar = LyingServer("liar", pair.engine)
    pair.step()
    pusher = WeightPusher([liar], "127.0.0.1", "gloo", deadline_s=20.0)
    report = await pair.push_as(77, pusher)
    refused = pair.engine.policy_version
    with pytest.raises(NeighbourError, match="serves nothing: its weights were not verified"):
        await pair.generate(5, 4)
    await asyncio.to_thread(pusher.close)
    await asyncio.to_thread(pair.pusher.set_servers, [])
    await asyncio.to_thread(pair.pusher.set_servers, [pair.server])
    again = await pair.push()
    fresh = await pair.generate(6, 32)

    assert report.synced == ()
    assert "liar failed to commit" in report.failed["liar"]
    assert "weight digest differs: sent 0000" in report.failed["liar"]
    assert refused is None
    assert again.failed == {}
    assert worst_difference(pair.learner, fresh) < 1e-4


async def test_a_push_that_lacks_a_parameter_is_refused_by_its_name(pair: Pair) -> None:
    lacking = "model.layers.1.mlp.down_proj.weight"
    plan, gathered = planned([named for named in pair.learner.named_parameters() if named[0] != lacking], 1 << 19)
    pair.version += 1
    report = await asyncio.to_thread(pair.pusher.push, pair.version, plan, gathered)
    again = await pair.push()
    while not again.synced:  # it joins anew in the background
        await asyncio.sleep(0.05)
        again = await pair.push()

    assert f"the push lacks 1 parameters of the model, first ['{lacking}']" in report.failed["sluice-rollout-0"]
    assert worst_difference(pair.learner, await pair.generate(24, 32)) < 1e-4
