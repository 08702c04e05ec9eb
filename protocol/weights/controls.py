"""The calls by which a learner changes a rollout server's weights."""

from typing import Any, Protocol

Attempt = tuple[str, int]
"""(learner, by `learner_name`; number of its attempt to join or to push, which grows)"""

FIRST_TURN = 1
"""Number of a run's first turn on shared devices: the run's command makes servers sleep before ranks load models."""


def learner_name(run_id: str, incarnation: int) -> str:
    """Return a name unique to this start of the run."""
    return f"{run_id}/{incarnation}"


class ServerControls(Protocol):
    """The weight controls of one rollout server. Any call may raise when the server is gone.

    `join_weights`, `prepare`, `sleep` and `wake` begin an attempt and cancel earlier ones. Late calls of earlier
    attempts, and calls of other learners, are refused.
    """

    @property
    def name(self) -> str: ...

    async def join_weights(self, attempt: Attempt, init: dict[str, Any], timeout_s: float) -> None:
        """Start to join the learner's broadcast group; generation continues."""
        ...

    async def prepare(self, attempt: Attempt, update: dict[str, Any]) -> None:
        """Get ready for one push's buckets. update: `wire.update_message`. Without a second copy, generation pauses."""
        ...

    async def receive(self, attempt: Attempt) -> None:
        """Return when the last bucket has arrived."""
        ...

    async def commit(self, attempt: Attempt, version: int, digest: str) -> float:
        """Make the received weights policy version `version`; returns the pause of generation in seconds.

        Raises: NeighbourError when the digest differs; generation then stops until a push succeeds.
        """
        ...

    async def probe(self, attempt: Attempt, tokens: list[int]) -> list[float]:
        """Return the logprobs of tokens[1:] under the held version, natural log at temperature 1."""
        ...

    async def serve(self, attempt: Attempt, version: int) -> None:
        """Let turns use the committed version after its verification."""
        ...

    async def leave(self, attempt: Attempt) -> None:
        """Leave the broadcast group."""
        ...

    async def sleep(self, attempt: Attempt) -> None:
        """Freeze generation after the current token and free the device's memory."""
        ...

    async def wake(self, attempt: Attempt) -> None:
        """Take the memory back; generation resumes with verified weights."""
        ...

    async def ping(self) -> None:
        """Return at once."""
        ...


VERBS = ("join_weights", "sleep", "prepare", "receive", "commit", "wake", "probe", "serve", "leave", "ping")
"""The methods of `ServerControls`."""
