"""A sample that waits for its engine, its environment, a reward service or a retriever, none of which answers."""

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from protocol.settings.rewards import RewardEndpoint
from rollout.environments.base import Resources, Step, Task, Turn
from rollout.environments.guard import GuardedEnvironment
from rollout.neighbours.http.endpoint import HttpPolicy
from rollout.neighbours.retriever_client import RetrieverClient
from rollout.neighbours.reward_client import EndpointScorer, ScoreRequest
from tests.chaos.hanging.way import Way, fork, raised_by, stop, timed
from tests.fakes.cuttable_link import CuttableLink
from tests.fakes.http_servers import free_address

_ATTEMPT_S = 1.0
_TURN_S = 1.0
# One attempt, and no outage: what is looked at is the limit of an attempt.
_POLICY = HttpPolicy(attempt_timeout_s=_ATTEMPT_S, max_attempts=1, breaker_threshold=1000)
_REQUEST = ScoreRequest(key="g/0", prompt="1 + 1 =", response=" 2", label="2")
_FAULTS = ("stalls", "stopped", "cut")


def rollout_ways() -> list[Way]:
    services = [
        Way(f"{service}_{fault}{when}", _ATTEMPT_S, (boundary, "http://127.0.0.1", f"{_ATTEMPT_S:g} s"), run)
        for service, boundary, calls in (
            ("reward", "reward:mine: ", _REWARD_CALLS),
            ("retriever", "retriever: ", _RETRIEVER_CALLS),
        )
        for fault in _FAULTS
        for when, run in ((when, partial(_silent_service, fault, call)) for when, call in calls.items())
    ]
    turn = f"within rollout.turn_timeout_s = {_TURN_S:g} s"
    return [
        *services,
        Way("environment_stalls_at_reset", _TURN_S, ("environment: no prompt", turn), partial(_environment, "reset")),
        Way(
            "environment_stalls_at_step", _TURN_S, ("environment: no observation", turn), partial(_environment, "step")
        ),
    ]


class _Standing:
    """An environment that stands still in one of its methods."""

    stop = ()

    def __init__(self, where: str) -> None:
        self._where = where

    async def reset(self, task: Task) -> Any:
        await self._stand("reset")
        return "a prompt"

    async def step(self, turn: Turn) -> Any:
        await self._stand("step")
        return Step(finish="answer")

    async def _stand(self, where: str) -> None:
        if where == self._where:
            await asyncio.sleep(3600)


def _environment(where: str, folder: Path) -> tuple[str, float]:
    guarded = GuardedEnvironment(lambda resources: _Standing(where), Resources(1, None), _TURN_S)
    task: Any = None

    async def call() -> object:
        return await (guarded.reset(task) if where == "reset" else guarded.step(Turn("", "stop", None)))

    return timed(lambda: raised_by(lambda: asyncio.run(call())))


async def _score(url: str) -> object:
    endpoint = RewardEndpoint.model_validate({"name": "mine", "url": url, "timeout_s": _ATTEMPT_S, "batch_size": 1})
    return await EndpointScorer(endpoint, {}, _POLICY).score(_REQUEST)


async def _check_reward(url: str) -> object:
    endpoint = RewardEndpoint.model_validate({"name": "mine", "url": url, "timeout_s": _ATTEMPT_S, "batch_size": 1})
    return await EndpointScorer(endpoint, {}, _POLICY).check()


async def _search(url: str) -> object:
    return await RetrieverClient([url], 1, None, _POLICY).search("who?")


async def _check_retriever(url: str) -> object:
    return await RetrieverClient([url], 1, None, _POLICY).check()


_Call = Callable[[str], Awaitable[object]]
_REWARD_CALLS: dict[str, _Call] = {"": _score, "_at_attach": _check_reward}
_RETRIEVER_CALLS: dict[str, _Call] = {"": _search, "_at_attach": _check_retriever}


def _silent_service(fault: str, call: _Call, folder: Path) -> tuple[str, float]:
    process, pipe = fork(_listen)
    port = pipe.recv()
    if fault == "stopped":
        stop(process.pid)
    if fault == "cut":
        link = CuttableLink("127.0.0.1", port)
        link.cut()
        port = link.port

    async def ask(url: str) -> None:
        await call(url)

    # The first call of a process reads the machine's certificates, which is no part of the wait.
    raised_by(lambda: asyncio.run(ask(free_address())))
    return timed(lambda: raised_by(lambda: asyncio.run(ask(f"http://127.0.0.1:{port}/ask"))))


def _listen(pipe: Connection) -> None:
    """Be a service that takes every connection and answers none."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(listener.getsockname()[1])
        taken = []
        while True:
            taken.append(listener.accept())
            threading.Event().wait(0.001)
