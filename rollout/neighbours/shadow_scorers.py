"""Reward endpoints that are asked and recorded, and decide nothing: a scorer is tried out on a running run's samples.

A shadow costs no sample: it has one attempt, and what has not come a little after the real rewards is given up.
"""

import asyncio
import dataclasses
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from protocol.errors import NeighbourError
from protocol.http.bodies import Scored
from protocol.settings.rewards import RewardEndpoint
from rollout.neighbours.http.circuit_breaker import BreakerOpen
from rollout.neighbours.http.retries import HttpPolicy
from rollout.neighbours.reward_endpoint import EndpointScorer
from rollout.neighbours.reward_request import ScoreRequest


class ShadowScorers:
    """`misses`: samples that went on without a shadow's answer, by shadow:NAME."""

    def __init__(
        self, endpoints: Sequence[tuple[RewardEndpoint, Mapping[str, str]]], policy: HttpPolicy, wait_s: float
    ) -> None:
        """endpoints: each with its headers. wait_s: longest wait, from when the real rewards are there."""
        once = dataclasses.replace(policy, max_attempts=1)
        self._scorers = [EndpointScorer(endpoint, headers, once, waits=False) for endpoint, headers in endpoints]
        self._wait_s = wait_s
        self.misses: Counter[str] = Counter()

    async def close(self) -> None:
        """Close the connections."""
        for scorer in self._scorers:
            await scorer.close()

    @asynccontextmanager
    async def asked(self, request: ScoreRequest) -> AsyncIterator["AskedShadows"]:
        """Ask every shadow about a sample for as long as the block lasts."""
        tasks = {scorer.name: asyncio.create_task(scorer.score(request)) for scorer in self._scorers}
        try:
            yield AskedShadows(tasks, self._wait_s, self.misses)
        finally:
            for task in tasks.values():
                task.cancel()
            if tasks:
                # Awaited, so that none of them is left with an exception that nobody looked at.
                await asyncio.wait(tasks.values())


class AskedShadows:
    """The questions about one sample that are under way."""

    def __init__(self, tasks: Mapping[str, "asyncio.Task[Scored]"], wait_s: float, misses: Counter[str]) -> None:
        self._tasks = tasks
        self._wait_s = wait_s
        self._misses = misses

    async def logs(self) -> dict[str, float]:
        """Return what the shadows gave, by endpoint/name: every `reward` and `answered` first. Blocks up to wait_s."""
        if not self._tasks:
            return {}
        await asyncio.wait(self._tasks.values(), timeout=self._wait_s)
        first: dict[str, float] = {}
        more: dict[str, float] = {}
        for name, task in self._tasks.items():
            scored = _answer(task)
            first[f"{name}/answered"] = 0.0 if scored is None else 1.0
            if scored is None:
                self._misses[f"shadow:{name}"] += 1
                continue
            first[f"{name}/reward"] = scored.reward
            more |= {f"{name}/{log}": value for log, value in sorted(scored.logs.items())}
        return first | {name: value for name, value in more.items() if name not in first}


def _answer(task: "asyncio.Task[Scored]") -> Scored | None:
    """Return what a shadow gave; None while it gave nothing, or in place of a failure."""
    if not task.done() or task.cancelled():
        return None
    error = task.exception()
    if error is not None and not isinstance(error, NeighbourError | BreakerOpen):
        raise error
    return None if error is not None else task.result()
