"""What vLLM gets before a commit and behind it, and under which name it caches that."""

import asyncio
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from protocol.errors import NeighbourError
from rollout.engine.engine import Engine
from rollout.engine.generation import Sampling
from tests.fakes.tiny_models import engine_of


class Sent(Exception):
    """A request has reached vLLM, which answers nothing here."""


class SendingEngine(Engine):
    """An engine whose requests reach vLLM, and no more."""

    async def _run_request(self, request: Mapping[str, Any], params: Any, request_id: str) -> Any:
        self._llm.sent.append(request["cache_salt"])
        raise Sent


class Vllm:
    """Notes its calls in order: names of a push's calls, and the salts of requests.

    refuses: name of a call that fails. received: answers of its workers.
    """

    def __init__(self, refuses: str = "", received: Sequence[list[bool]] = ([True],)) -> None:
        self.sent: list[str] = []
        self.errored = False
        self._refuses = refuses
        self._received = iter(received)
        resources = SimpleNamespace(engine_manager=None)
        self.engine_core = SimpleNamespace(pause_scheduler_async=self._pause, resources=resources)
        scheduler = SimpleNamespace(scheduler_cls="", max_num_seqs=8)
        cache = SimpleNamespace(num_gpu_blocks=None, block_size=16, enable_prefix_caching=True)
        model = SimpleNamespace(try_get_generation_config=dict)
        self.vllm_config = SimpleNamespace(scheduler_config=scheduler, cache_config=cache, model_config=model)

    def get_tokenizer(self) -> Any:
        return None

    async def _pause(self, mode: str, clear_cache: bool) -> None:
        assert (mode, clear_cache) == ("keep", False)
        await self._note("pause")

    async def update_weights(self, request: Any) -> None:
        await self._note(request.update_info["expected_digest"])

    async def finish_weight_update(self, version: str) -> None:
        await self._note(version)

    async def resume_generation(self) -> None:
        await self._note("resume")

    async def collective_rpc(self, method: str) -> list[bool]:
        await asyncio.sleep(0)
        if (answer := next(self._received, None)) is None:
            await asyncio.Event().wait()
        return answer or []

    async def _note(self, call: str) -> None:
        self.sent.append(call)
        await asyncio.sleep(0)
        if call == self._refuses:
            raise ValueError("refused")


async def test_request_that_vllm_gets_before_new_weights_is_not_cached_under_their_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollout.engine.engine.sampling_params", lambda *_: None)
    vllm = Vllm()
    engine = SendingEngine(engine_of("model"), vllm)
    engine.policy_version, engine._is_received = 1, True

    async def generate() -> None:
        with pytest.raises(Sent):
            await engine.generate([5, 6], Sampling(1, 1.0), "request")

    committing = asyncio.ensure_future(engine.commit(2, "digest"))
    await asyncio.gather(*(generate() for _ in range(3)))  # each is ready to be sent before the commit is
    await committing
    await generate()

    where = vllm.sent.index("pause")
    assert not set(vllm.sent[:where]) & set(vllm.sent[where:])


async def test_commit_loads_confirmed_weights_during_a_pause() -> None:
    engine = SendingEngine(engine_of("model"), vllm := Vllm())
    engine._is_received = True

    assert 0.0 <= await engine.commit(2, "digest") < 60.0
    assert vllm.sent == ["pause", "digest", "2", "resume"]
    assert not engine.stats.is_paused


@pytest.mark.parametrize("refuses", ["pause", "digest", "2"])
async def test_engine_stays_paused_without_a_version_after_a_refusal(refuses: str) -> None:
    engine = SendingEngine(engine_of("model"), vllm := Vllm(refuses))
    engine.policy_version, engine._is_received = 1, True
    with pytest.raises(NeighbourError, match=r"^engine: ValueError: refused$"):
        await engine.commit(2, "digest")

    assert vllm.sent[-1] == refuses
    assert engine.policy_version is None
    assert engine.stats.is_paused


async def test_push_is_received_when_every_worker_has_it() -> None:
    engine = SendingEngine(engine_of("model"), Vllm(received=([True, False], [True, True])))
    engine._update = {}
    await engine.receive()

    assert engine._is_received


async def test_receiving_ends_when_the_engine_is_dead() -> None:
    engine = SendingEngine(engine_of("model"), vllm := Vllm(received=()))
    engine._update, vllm.errored = {}, True
    with pytest.raises(NeighbourError, match=r"^engine: died before it answered sluice_has_received$"):
        await engine.receive()


async def test_push_that_the_engine_forgot_while_it_came_is_not_loaded_for_who_comes_next() -> None:
    vllm = Vllm()
    engine = SendingEngine(engine_of("model"), vllm)
    engine._update = {}
    receiving = asyncio.ensure_future(engine.receive())
    await asyncio.sleep(0)
    engine.forget_weights()
    await receiving

    with pytest.raises(NeighbourError, match=r"^engine: cannot commit: nothing was received for the attached run$"):
        await engine.commit(2, "digest")
    assert vllm.sent == []


async def test_weights_that_the_engine_forgot_while_they_were_loaded_are_no_version() -> None:
    vllm = Vllm()
    engine = SendingEngine(engine_of("model"), vllm)
    engine._is_received = True
    committing = asyncio.ensure_future(engine.commit(2, "digest"))
    await asyncio.sleep(0)
    engine.forget_weights()

    with pytest.raises(NeighbourError, match=r"^engine: was attached to another run before version 2 was loaded$"):
        await committing
    assert engine.policy_version is None


@pytest.mark.parametrize(("num_cached", "is_first"), [(128, True), (128, False), (0, True)])
async def test_probe_finds_keys_and_values_cached_under_other_weights(num_cached: int, is_first: bool) -> None:
    class ProbedEngine(Engine):
        async def _run_request(self, request: Mapping[str, Any], params: Any, request_id: str) -> Any:
            assert params.skip_reading_prefix_cache is not is_first
            logprobs = SimpleNamespace(logprobs=[-2.0, -3.0])
            return SimpleNamespace(num_cached_tokens=num_cached, prompt_logprobs=logprobs)

    engine = ProbedEngine(engine_of("model"), Vllm())
    engine.policy_version, engine._is_cache_fresh = 2, is_first
    if num_cached and is_first:
        with pytest.raises(NeighbourError, match=r"128 tokens' .* cached under other weights than version 2's"):
            await engine.probe([5, 6, 7])
    else:
        assert await engine.probe([5, 6, 7]) == [-2.0, -3.0]
