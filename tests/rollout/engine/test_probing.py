"""What is asked of an engine about the learner's text, and when: the answer is on its way before it is asked for."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from protocol.errors import NeighbourError
from rollout.engine.probing import Probing

TEXT = [5, 6, 7]


class Vllm:
    """Answers each request once it may, as if by the weights of `version`."""

    def __init__(self) -> None:
        self.requests: list[tuple[list[int], str, bool]] = []  # text, salt, whether cached keys and values are read
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.version = 1
        self.num_cached = 0
        self.failure: Exception | None = None

    async def ask(self, tokens: list[int], salt: str, reads_cache: bool) -> Any:
        self.requests.append((tokens, salt, reads_cache))
        await self.may_answer.wait()
        if self.failure is not None:
            raise self.failure
        return SimpleNamespace(
            num_cached_tokens=self.num_cached,
            prompt_logprobs=SimpleNamespace(logprobs=[-float(self.version)] * (len(tokens) - 1)),
            outputs=[SimpleNamespace(weight_versions=[SimpleNamespace(version=str(self.version))])],
        )


async def _pushed(vllm: Vllm, probing: Probing, version: int, salt: str) -> None:
    vllm.version = version
    probing.begin(salt)
    await asyncio.sleep(0)


async def test_what_was_asked_for_once_is_under_way_when_it_is_asked_for_again() -> None:
    vllm = Vllm()
    probing = Probing(vllm.ask)
    await _pushed(vllm, probing, 1, "a")
    assert vllm.requests == []

    assert await probing.logprobs(TEXT, "a", 1, is_first=True) == [-1.0, -1.0]
    await _pushed(vllm, probing, 2, "b")
    assert vllm.requests == [(TEXT, "a", True), (TEXT, "b", True)]

    assert await probing.logprobs(TEXT, "b", 2, is_first=True) == [-2.0, -2.0]
    assert len(vllm.requests) == 2


async def test_weights_of_which_nobody_asked_are_the_last_that_are_asked() -> None:
    vllm = Vllm()
    probing = Probing(vllm.ask)
    await probing.logprobs(TEXT, "a", 1, is_first=True)
    await _pushed(vllm, probing, 2, "b")
    await _pushed(vllm, probing, 3, "c")

    assert [salt for _, salt, _ in vllm.requests] == ["a", "b"]
    assert await probing.logprobs(TEXT, "c", 3, is_first=True) == [-3.0, -3.0]


@pytest.mark.parametrize(
    ("text", "salt", "version"),
    [([5, 6, 8], "b", 2), (TEXT, "other", 2), (TEXT, "b", 3)],
    ids=["text", "salt", "version"],
)
async def test_answer_to_anything_else_is_not_taken(text: list[int], salt: str, version: int) -> None:
    vllm = Vllm()
    probing = Probing(vllm.ask)
    await probing.logprobs(TEXT, "a", 1, is_first=True)
    await _pushed(vllm, probing, 2, "b")
    for _ in range(3):  # it is answered
        await asyncio.sleep(0)
    vllm.version = 9

    assert await probing.logprobs(text, salt, version, is_first=False) == [-9.0, -9.0]
    assert vllm.requests[-1] == (text, salt, False)


async def test_keys_and_values_of_other_weights_are_found_on_the_way_too() -> None:
    vllm = Vllm()
    probing = Probing(vllm.ask)
    await probing.logprobs(TEXT, "a", 1, is_first=True)
    vllm.num_cached = 128
    await _pushed(vllm, probing, 2, "b")

    with pytest.raises(
        NeighbourError, match=r"from 128 tokens' keys and values cached under other weights than version 2's"
    ):
        await probing.logprobs(TEXT, "b", 2, is_first=False)


async def test_failure_on_the_way_is_who_asks_s_and_the_next_push_is_asked_anew() -> None:
    vllm = Vllm()
    probing = Probing(vllm.ask)
    await probing.logprobs(TEXT, "a", 1, is_first=True)
    vllm.failure = NeighbourError("engine", "died")
    await _pushed(vllm, probing, 2, "b")
    with pytest.raises(NeighbourError, match="died"):
        await probing.logprobs(TEXT, "b", 2, is_first=True)

    vllm.failure = None
    await _pushed(vllm, probing, 3, "c")
    assert [salt for _, salt, _ in vllm.requests] == ["a", "b"]
    assert await probing.logprobs(TEXT, "c", 3, is_first=True) == [-3.0, -3.0]


async def test_cancelled_probe_ends_in_the_engine() -> None:
    vllm = Vllm()
    probing = Probing(vllm.ask)
    await probing.logprobs(TEXT, "a", 1, is_first=True)
    vllm.may_answer.clear()
    await _pushed(vllm, probing, 2, "b")
    ahead = probing._early
    assert ahead is not None
    probing.cancel()

    with pytest.raises(asyncio.CancelledError):
        await ahead.answer
