"""Every failure of a reward service and of a retriever, as one table: number of requests, result or error."""

import gzip
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from protocol.errors import NeighbourError
from rollout.neighbours.http.endpoint import HttpPolicy
from rollout.neighbours.retriever_client import RetrieverClient
from rollout.neighbours.reward_client import RewardClient
from tests.fakes.http_servers import Answer, ScriptedServer, free_address
from tests.rollout.neighbours.asking_rewards import FAST, endpoint, request

# The breaker stays closed: it opens by the clock, which the attempts of a loaded machine may outlast.
POLICY = replace(FAST, breaker_after_s=600.0, overall_timeout_s=600.0)


@dataclass(frozen=True)
class Neighbour:
    """A client with its good answer. call: requests the good value once from a URL."""

    boundary: str
    good: Answer
    value: Any
    call: Callable[[str, HttpPolicy], Awaitable[Any]]


async def _score(url: str, policy: HttpPolicy) -> float:
    async with RewardClient([endpoint(url, timeout_s=policy.attempt_timeout_s)], "sum", policy=policy) as client:
        return (await client.score(request())).reward


async def _search(url: str, policy: HttpPolicy) -> list[str]:
    async with RetrieverClient([url], topk=1, policy=policy) as client:
        return [passage.contents for passage in await client.search("q")]


NEIGHBOURS = [
    Neighbour("reward:math", Answer({"rewards": [0.5]}), 0.5, _score),
    Neighbour("retriever", Answer({"result": [["a"]]}), ["a"], _search),
]
# name: (answers before the good one, number of requests)
RECOVERIES = {
    **{f"busy {status}": ([Answer("busy", status)] * 3, 4) for status in (408, 429, 502, 503, 504)},
    "a 500": ([Answer("oops", 500)], 2),
    "an unusable reply": ([Answer(b"<html>")], 2),
    "Retry-After above the limit": ([Answer("busy", 429, headers={"retry-after": "3600"})], 2),
    "a slow answer": ([Answer("late", delay_s=3.0)], 2),
}
_BOMB = gzip.compress(b"[" + b" " * (1 << 24) + b"1]")
# name: (answers, number of requests, error text)
FAILURES = {
    "503 for ever": ([Answer("down", 503)], 4, r'answered 503: "down" \(4 attempts in '),
    "four statuses": (
        [Answer("down", status) for status in (503, 502, 504, 408)], 4, r'answered 408: "down" \(4 attempts in '),
    "500 for ever": ([Answer("oops", 500)], 2, r'answered 500: "oops" \(2 attempts in '),
    **{
        f"refusal {status}": ([Answer(b"x" * 499 + b"yz", status)], 1, rf"answered {status}: x{{499}}y \(1 attempt in ")
        for status in (301, 400, 401, 404, 413, 422)
    },
    "redirect": (
        [Answer("", 307, headers={"location": "/b"})], 1, "answered 307: redirected to '/b', which is not followed."),
    "HTML": ([Answer(b"<html>")], 2, r"in the reply \$ is not JSON .*'<html>' \(2 attempts in "),
    "an empty reply": ([Answer(b"")], 2, r"in the reply \$ is not JSON "),
    "a long reply": ([Answer(b" " * (1 << 20) + b"1")], 2, r"the reply is over 1048576 bytes \(2 attempts in "),
    "a compressed reply": (
        [Answer(_BOMB, headers={"content-encoding": "gzip"})], 2, "the reply is compressed, which was not requested"),
}  # fmt: skip


@pytest.mark.parametrize("neighbour", NEIGHBOURS, ids=lambda neighbour: neighbour.boundary)
@pytest.mark.parametrize("name", RECOVERIES)
async def test_call_is_retried(server: ScriptedServer, neighbour: Neighbour, name: str) -> None:
    answers, num_requests = RECOVERIES[name]
    url = server.script("recovers", *answers, neighbour.good)
    policy = replace(POLICY, max_retry_after_s=0.05, attempt_timeout_s=1.0 if name == "a slow answer" else 20.0)
    assert await neighbour.call(url, policy) == neighbour.value
    assert len(server.received["recovers"]) == num_requests


@pytest.mark.parametrize("neighbour", NEIGHBOURS, ids=lambda neighbour: neighbour.boundary)
@pytest.mark.parametrize("name", FAILURES)
async def test_call_fails(server: ScriptedServer, neighbour: Neighbour, name: str) -> None:
    answers, num_requests, problem = FAILURES[name]
    url = server.script("fails", *answers)
    with pytest.raises(NeighbourError, match=f"^{neighbour.boundary}: {re.escape(url)}:? .*{problem}"):
        await neighbour.call(url, POLICY)
    assert len(server.received["fails"]) == num_requests
    assert all(received.headers["accept-encoding"] == "identity" for received in server.received["fails"])


@pytest.mark.parametrize("neighbour", NEIGHBOURS, ids=lambda neighbour: neighbour.boundary)
async def test_service_that_does_not_listen_is_reported(neighbour: Neighbour) -> None:
    url = free_address()
    problem = rf"^{neighbour.boundary}: {re.escape(url)}/?: no connection \(Connect call failed .* \(4 attempts in "
    with pytest.raises(NeighbourError, match=problem):
        await neighbour.call(url, POLICY)


@pytest.mark.parametrize("neighbour", NEIGHBOURS, ids=lambda neighbour: neighbour.boundary)
async def test_all_attempts_share_a_deadline(server: ScriptedServer, neighbour: Neighbour) -> None:
    url = server.script("slower", Answer("late", delay_s=1.0))
    policy = replace(POLICY, attempt_timeout_s=0.2, overall_timeout_s=0.6, max_attempts=50)
    started = time.monotonic()
    with pytest.raises(NeighbourError, match=r"within 0.6 s over all attempts"):
        await neighbour.call(url, policy)
    assert time.monotonic() - started < 10.0  # the duration of 50 attempts


@pytest.mark.parametrize("neighbour", NEIGHBOURS, ids=lambda neighbour: neighbour.boundary)
async def test_pause_is_at_least_the_services_retry_after(server: ScriptedServer, neighbour: Neighbour) -> None:
    url = server.script("later", Answer("busy", 503, headers={"retry-after": "0.4"}), neighbour.good)
    started = time.monotonic()
    assert await neighbour.call(url, POLICY) == neighbour.value
    assert time.monotonic() - started > 0.4


@pytest.mark.parametrize(
    ("neighbour", "body", "problem"),
    [
        (NEIGHBOURS[0], {"rewards": [float("nan")]}, r"\$\.rewards\[0\] is nan, expected a finite number"),
        (NEIGHBOURS[0], {"rewards": [float("inf")]}, r"\$\.rewards\[0\] is inf, expected a finite number"),
        (NEIGHBOURS[0], {"rewards": []}, r"\$\.rewards has 0 entries, expected 1 \(one per sample\)"),
        (NEIGHBOURS[0], {"rewards": [1, 2]}, r"\$\.rewards has 2 entries, expected 1 \(one per sample\)"),
        (NEIGHBOURS[0], {"rewards": ["1"]}, r"\$\.rewards\[0\] is '1', expected a number"),
        (NEIGHBOURS[0], {"error": "no"}, r"\$\.rewards is missing; the reply has the keys \['error'\]"),
        (NEIGHBOURS[1], {"result": []}, r"\$\.result has 0 entries, expected 1 \(one per query\)"),
        (NEIGHBOURS[1], {"result": [[{"document": {}}]]}, r"\$\.result\[0\]\[0\]\.document\.contents is None"),
    ],
)
async def test_invalid_reply_is_never_a_result(
    server: ScriptedServer, neighbour: Neighbour, body: Any, problem: str
) -> None:
    url = server.script("invalid", Answer(body))
    with pytest.raises(NeighbourError, match=rf"in the reply {problem}"):
        await neighbour.call(url, POLICY)
