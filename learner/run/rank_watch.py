"""Tells a learner rank that works from one whose process stands still: while they train, each is asked what it is at.

A step may take hours, and nothing else waits for a rank that never ends one: the coordinator, the servers and the
other ranks would stand still with it, without a word.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from protocol.errors import NeighbourError

# A rank that loads or writes a large model may keep its interpreter from answering for a minute.
SILENCE_S = 120.0


class AskedRank(Protocol):
    """A learner rank as it is asked: `learner.cluster.processes.Rank`."""

    @property
    def name(self) -> str: ...

    def ask(self, method: str, *arguments: Any) -> Any:
        """Return a reference to the answer."""


@dataclass
class _Watched:
    """One rank, as far as its last answer tells."""

    rank: AskedRank
    heard_at: float  # monotonic seconds of its last answer, or of the beginning
    phase: str = "it has told nothing yet"  # what it said that it was at
    pending: Any = field(default=None)  # the question under way


class RankWatch:
    """Call `poll` every few seconds; it never blocks."""

    def __init__(
        self,
        ranks: Sequence[AskedRank],
        is_done: Callable[[Any], bool],
        result: Callable[[Any, str], Any],
        silence_s: float = SILENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """is_done, result: whether a reference's answer is there, and the answer. silence_s: longest time without one.

        clock: in seconds.
        """
        self._is_done = is_done
        self._result = result
        self._silence_s = silence_s
        self._clock = clock
        self._ranks = [_Watched(rank, clock()) for rank in ranks]

    @property
    def phases(self) -> list[str]:
        """What each rank was last heard to be at."""
        return [watched.phase for watched in self._ranks]

    def poll(self) -> None:
        """Take answers that have come and ask on.

        Raises: NeighbourError naming the rank that has not answered for silence_s, with what it was at.
        """
        for watched in self._ranks:
            self._advance(watched)

    def explained(self, error: NeighbourError) -> NeighbourError:
        """Return a rank's error; when it waited too long for the others, with what each rank was last heard to be at.

        Torch's text of a collective that timed out names no rank.
        """
        if "timed out" not in error.detail.lower() or len(self._ranks) < 2:
            return error
        now = self._clock()
        phases = (f"{one.rank.name}: {one.phase}, {now - one.heard_at:.0f} s ago" for one in self._ranks)
        problem = f"waited for another rank longer than learner.rank_timeout_s; last heard: {'; '.join(phases)}"
        return NeighbourError(error.boundary, f"{problem} ({error.detail})")

    def _advance(self, watched: _Watched) -> None:
        if watched.pending is None:
            watched.pending = watched.rank.ask("progress")
        elif self._is_done(watched.pending):
            reference, watched.pending = watched.pending, None
            watched.heard_at = self._clock()
            # One that died is told by the call that trains: the coordinator may be what died first.
            with suppress(NeighbourError):
                watched.phase, _ = self._result(reference, watched.rank.name)
        elif self._clock() - watched.heard_at > self._silence_s:
            problem = (
                f"did not answer the run's command for {self._silence_s:g} s while it trained; last: {watched.phase}"
            )
            raise NeighbourError(watched.rank.name, problem)
