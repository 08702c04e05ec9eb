"""How a session has ended: what is kept of it, so that whoever comes late is told."""

from dataclasses import dataclass, field
from typing import Any

from rollout.endpoint.bodies import RewardBody
from rollout.endpoint.refusals import Refused

_REPORTED = "its end was reported"


@dataclass
class SessionEnd:
    """Of one session; nothing of what was said in it."""

    id: str  # of the session
    api_key: str = field(repr=False)  # the session's
    because: str | None = None  # why it has ended, in words; None: it goes on
    reported: RewardBody | None = None  # what its agent gave; None: nothing

    def check_open(self) -> None:
        """Raise Refused once it has ended."""
        if self.because is not None:
            raise Refused(410, f"session {self.id} has ended: {self.because}", code="session_ended")

    def report(self, reward: RewardBody | None) -> dict[str, Any]:
        """Return what is told of a report, which is counted the first time.

        Raises: Refused for a session that has ended otherwise, or with another reward.
        """
        if self.because == _REPORTED and reward == self.reported:
            return {"id": self.id, "counted": False, "detail": "this was reported before, and counted once"}
        self.check_open()
        self.because, self.reported = _REPORTED, reward
        return {"id": self.id, "counted": True, "detail": "the sample is finished"}
