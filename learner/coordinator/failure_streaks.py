"""Failures of samples while none succeeds: the run names them, and ends when one line of user code keeps raising."""

from collections import Counter

_NUM_NAMED_AT_FIRST, _NUM_NAMED_LATER = 2, 16
_NUM_FATAL = 32
_CHANGED_TURNS = (
    "An agent sent a turn of the policy back in other words, as smolagents does: turns before the change are not "
    "trained. The curve environment/changed_turns counts them."
)


class FailureStreaks:
    """Counts failures since the last sample that came back.

    A service that is down fails many samples and comes back. A line of code that raises for 32 samples in a row will
    raise for all others.
    """

    def __init__(self) -> None:
        self.notices: list[str] = []  # sentences for the operator, at most one for each boundary
        self.give_up_reason: str | None = None  # why the run has to end
        self._num_accepted = 0  # samples that came back before the newest failure
        self._num_failed: Counter[str] = Counter()  # boundary -> failures in a row
        self._num_raised: Counter[tuple[str, str]] = Counter()  # (boundary, place) -> failures in a row
        self._named: set[str] = set()

    def note_changed_turns(self) -> None:
        """Record that an agent changed a turn of the policy; the operator reads it once."""
        if _CHANGED_TURNS not in self.notices:
            self.notices.append(_CHANGED_TURNS)

    def add(self, boundary: str, detail: str, place: str, num_accepted: int) -> None:
        """Record a failed sample.

        place: file and line of the user's code that raised; empty: no such code did. num_accepted: samples that came
        back in this start.
        """
        if num_accepted > self._num_accepted:
            self._num_accepted = num_accepted
            self._num_failed.clear()
            self._num_raised.clear()
        self._num_failed[boundary] += 1
        num, num_named = self._num_failed[boundary], _NUM_NAMED_LATER if num_accepted else _NUM_NAMED_AT_FIRST
        if num >= num_named and boundary not in self._named:
            self._named.add(boundary)
            self.notices.append(f"{boundary} failed for {num} samples in a row: {detail}")
        if not place:
            return
        self._num_raised[boundary, place] += 1
        if self._num_raised[boundary, place] >= _NUM_FATAL and self.give_up_reason is None:
            self.give_up_reason = (
                f"{boundary} failed for {_NUM_FATAL} samples in a row at {place}: {detail[:1000]}. "
                "Repair the code, and start the run again."
            )
