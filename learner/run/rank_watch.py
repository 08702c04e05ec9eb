"""Finds a learner rank that hangs: while the ranks train, each is asked for its progress.

A step may take hours. Otherwise the coordinator, servers and other ranks would wait for it silently.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from learner.cluster.processes import Rank
from protocol.errors import NeighbourError

# A rank that loads or writes a large model may block its interpreter for a minute.
SILENCE_S = 120.0


@dataclass
class _RankState:
    """One rank as of its last answer."""

    rank: Rank
    heard_at: float  # seconds of the clock of the last answer, or of the beginning
    phase: str = "it has not answered yet"  # phase in the last answer
    call: Any = None  # reference to the question under way


class RankWatch:
    """Call `poll` every few seconds; it never blocks."""

    def __init__(
        self,
        ranks: Sequence[Rank],
        is_done: Callable[[Any], bool],
        result: Callable[[Any, str], Any],
        silence_s: float = SILENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """is_done, result: whether a reference's answer is there, and the answer. clock: in seconds.

        silence_s: longest wait for an answer.
        """
        self._is_done = is_done
        self._result = result
        self._silence_s = silence_s
        self._clock = clock
        self._states = [_RankState(rank, clock()) for rank in ranks]

    @property
    def phases(self) -> list[str]:
        """The last known phase of each rank."""
        return [state.phase for state in self._states]

    def poll(self) -> None:
        """Take answers and ask again.

        Raises: NeighbourError with the rank that has not answered for silence_s, and its last phase.
        """
        for state in self._states:
            self._advance(state)

    def explain(self, error: NeighbourError) -> NeighbourError:
        """Return a rank's error, with the last phase of every rank when it waited too long for the others.

        Torch's text about a collective that timed out names no rank.
        """
        if "timed out" not in error.detail.lower() or len(self._states) < 2:
            return error
        now = self._clock()
        phases = (f"{state.rank.name}: {state.phase}, {now - state.heard_at:.0f} s ago" for state in self._states)
        problem = f"waited for another rank longer than learner.rank_timeout_s; last heard: {'; '.join(phases)}"
        return NeighbourError(error.boundary, f"{problem} ({error.detail})")

    def _advance(self, state: _RankState) -> None:
        if state.call is None:
            state.call = state.rank.ask("progress")
        elif self._is_done(state.call):
            reference, state.call = state.call, None
            state.heard_at = self._clock()
            # The call that trains reports a crashed rank: the coordinator may have crashed first.
            with suppress(NeighbourError):
                state.phase, _ = self._result(reference, state.rank.name)
        elif self._clock() - state.heard_at > self._silence_s:
            problem = (
                f"did not answer the run's command for {self._silence_s:g} s while it trained; last: {state.phase}"
            )
            raise NeighbourError(state.rank.name, problem)
