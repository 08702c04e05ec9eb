"""What vLLM gets before a commit and behind it, and under which name it caches that."""

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from protocol.errors import NeighbourError
from rollout.engine.core_calls import COMMIT, HAS_RECEIVED
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
    """Notes what it is sent, in order: "commit", or the salt of a request."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.errored = False
        self.engine_core = SimpleNamespace(
            call_utility_async=self._call, resources=SimpleNamespace(engine_manager=None)
        )
        self.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(scheduler_cls=""))

    def get_tokenizer(self) -> Any:
        return None

    async def _call(self, method: str, *_: str) -> float | bool:
        if method == HAS_RECEIVED:
            await asyncio.sleep(0)
            return True
        assert method == COMMIT
        self.sent.append("commit")
        await asyncio.sleep(0)
        return 0.0


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

    where = vllm.sent.index("commit")
    assert not set(vllm.sent[:where]) & set(vllm.sent[where:])


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
