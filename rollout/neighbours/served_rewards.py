"""The reward services of a run, which may be given others while it goes on: each sample is scored by one set alone.

use(set 2) -> what finishes from now on is asked of set 2
              what is being asked of set 1 gets its answer, or is asked of set 2 when set 1 is down or slow
"""

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

from pydantic import ValidationError

from protocol.errors import OperatorError
from protocol.settings.reward_sets import RewardSet
from rollout.neighbours.reward_client import Score, ScoreRequest

# What an earlier set has not scored by then is asked of the set in force.
_EARLIER_S = 10.0


class OneSet(Protocol):
    """The reward services of one set: `RewardClient`, or `NoRewards`."""

    @property
    def is_accepting(self) -> bool: ...

    @property
    def shadow_misses(self) -> Mapping[str, int]: ...

    async def score(self, request: ScoreRequest) -> Score: ...

    async def check(self) -> None: ...

    async def close(self) -> None: ...


@dataclass(eq=False)
class _Open:
    """A set with its connections."""

    number: int
    client: OneSet
    under_way: set["asyncio.Task[Score]"] = field(default_factory=set)


class ServedRewards:
    """Scores by the set in force; an async context manager, of one event loop.

    problem: why this server cannot use the set that it was told last, in words; None: it does.
    """

    def __init__(self, number: int, client: OneSet, open_set: Callable[[RewardSet], OneSet]) -> None:
        """number, client: of the set in force. open_set: makes the client of another; raises OperatorError."""
        self.problem: str | None = None
        self._used = _Open(number, client)
        self._open_set = open_set
        self._earlier: set[_Open] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._closed_misses: Counter[str] = Counter()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def number(self) -> int:
        """The set that scores what finishes now."""
        return self._used.number

    @property
    def is_accepting(self) -> bool:
        """False while finished trajectories could not be scored, or not by the set in force."""
        return self.problem is None and self._used.client.is_accepting

    @property
    def shadow_misses(self) -> Mapping[str, int]:
        """Samples that went on without a shadow's reward since the run attached, by shadow:NAME."""
        missed = Counter(self._closed_misses)
        for one in (*self._earlier, self._used):
            missed.update(one.client.shadow_misses)
        return missed

    def use(self, number: int, scoring: str) -> None:
        """Score by this set from now on. scoring: JSON of a `RewardSet`. What cannot be used stands in `problem`."""
        if number == self.number:
            self.problem = None
            return
        try:
            client = self._open_set(RewardSet.model_validate_json(scoring))
        except ValidationError as error:
            self.problem = f"reward set {number} cannot be read here: {error.errors(include_url=False)[0]['msg']}"
            return
        except OperatorError as error:
            self.problem = str(error)
            return
        earlier, self._used, self.problem = self._used, _Open(number, client), None
        self._earlier.add(earlier)
        ending = asyncio.get_running_loop().create_task(self._end(earlier))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def check(self) -> None:
        """Ask every endpoint once. Raises: NeighbourError naming the first that cannot be used, and what to change."""
        await self._used.client.check()

    async def score(self, request: ScoreRequest) -> Score:
        """Return the sample's reward, and the set that gave it. Raises: NeighbourError, as the set in force does."""
        while True:
            used = self._used
            task = asyncio.get_running_loop().create_task(used.client.score(request))
            used.under_way.add(task)
            try:
                # Not awaited itself: that an earlier set is given up is no cancelling of this sample.
                await asyncio.wait([task])
            finally:
                if not task.done():
                    task.cancel()
                    await asyncio.wait([task])
                used.under_way.discard(task)
            has_failed = task.cancelled() or task.exception() is not None
            if has_failed and used is not self._used:
                continue
            return dataclasses.replace(task.result(), reward_set=used.number)

    async def close(self) -> None:
        """Close the connections, an earlier set's too."""
        for ending in self._ending:
            ending.cancel()
        await asyncio.gather(*self._ending, return_exceptions=True)
        for one in (*self._earlier, self._used):
            await self._close(one)

    async def _end(self, earlier: _Open) -> None:
        """Let an earlier set finish what it was asked, for as long as it may take; then close its connections."""
        if earlier.under_way and earlier.client.is_accepting:
            await asyncio.wait(set(earlier.under_way), timeout=_EARLIER_S)
        await self._close(earlier)
        self._earlier.discard(earlier)
        self._closed_misses.update(earlier.client.shadow_misses)

    async def _close(self, one: _Open) -> None:
        for task in one.under_way:
            task.cancel()
        await one.client.close()
