"""The calls by which a learner changes a rollout server's weights."""

from typing import Any, Protocol

Attempt = tuple[str, int]
"""(learner, by `learner_name`; number of its attempt to join or to push, which grows)"""

FIRST_TURN = 1
"""Number of a run's first turn on shared devices: the run's command makes servers sleep before ranks load models."""


def learner_name(run_id: str, incarnation: int) -> str:
    """Return a name that differs for every start of every run."""
    return f"{run_id}/{incarnation}"


class ServerControls(Protocol):
    """The weight controls of one rollout server. Any call may raise anything when the server is gone.

    `join_weights`, `prepare`, `sleep` and `wake` begin an attempt and cancel calls of earlier ones. Late calls of
    earlier attempts, and calls of another learner than the attached run's, are refused.
    """

    @property
    def name(self) -> str: ...

    async def join_weights(self, attempt: Attempt, init: dict[str, Any], timeout_s: float) -> None:
        """Start to join the learner's broadcast group; generation continues. init: by the learner's rendezvous."""
        ...

    async def prepare(self, attempt: Attempt, update: dict[str, Any]) -> None:
        """Get ready for one push's buckets. update: `wire.update_message`. Without a second copy, generation pauses."""
        ...

    async def receive(self, attempt: Attempt) -> None:
        """Return when the last bucket has arrived."""
        ...

    async def commit(self, attempt: Attempt, version: int, digest: str) -> float:
        """Make the received weights policy version `version`; returns the pause of generation in seconds.

        Raises: NeighbourError when the digest differs: nothing is generated then until a push succeeds.
        """
        ...

    async def probe(self, attempt: Attempt, tokens: list[int]) -> list[float]:
        """Return the logprobs of tokens[1:] under the held version, natural log at temperature 1."""
        ...

    async def serve(self, attempt: Attempt, version: int) -> None:
        """Let turns begin and end with the committed version, which the learner has verified."""
        ...

    async def leave(self, attempt: Attempt) -> None:
        """Leave the broadcast group."""
        ...

    async def sleep(self, attempt: Attempt) -> None:
        """Freeze generation after the current token and free the device's memory. Numbered apart from pushes."""
        ...

    async def wake(self, attempt: Attempt) -> None:
        """Take the device's memory back; generation resumes if the weights are verified."""
        ...

    async def ping(self) -> None:
        """Return at once."""
        ...


VERBS = ("join_weights", "sleep", "prepare", "receive", "commit", "wake", "probe", "serve", "leave", "ping")
"""The methods of `ServerControls`."""
