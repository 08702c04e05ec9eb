"""The verbs by which a learner changes weights: an engine's, and a rollout server's, which say whose call it is."""

from typing import Any, Protocol


class WeightControls(Protocol):
    """What can be asked of whoever holds weights; every call may raise anything when it is gone."""

    async def join_weights(self, init: dict[str, Any], timeout_s: float) -> None:
        """Start joining the learner's broadcast group. init: of the rendezvous; its keys are the backend's."""
        ...

    async def prepare(self, update: dict[str, Any]) -> None:
        """Get ready for one push's buckets; all are ready before the first is sent. update: `wire.update_message`.

        Generation goes on where there is room for a second copy of the weights, and stops here where there is none.
        """
        ...

    async def receive(self) -> None:
        """Return when the last bucket has come."""
        ...

    async def commit(self, version: int, digest: str) -> float:
        """Make what was received policy version `version`; returns for how many seconds nothing was generated.

        Generation goes on. Raises when the digest is another: nothing is generated then until a push succeeds.
        """
        ...

    async def sleep(self) -> None:
        """Freeze generation after the token under way and give the device's memory up, for whom it is shared with.

        Requests in flight go on after `wake`; what they have cached is computed again. Done already: nothing happens.
        """
        ...

    async def wake(self) -> None:
        """Take the device's memory back; generation goes on if the weights may be used. Awake already: nothing."""
        ...

    async def probe(self, tokens: list[int]) -> list[float]:
        """Return the logprobs of tokens[1:] under the version held, natural log at temperature 1."""
        ...

    async def leave(self) -> None:
        """Leave the broadcast group; with intact weights, generation goes on."""
        ...


Attempt = tuple[str, int]
"""(the learner, by `learner_name`; its attempt to join or to push that a call belongs to, by a number that grows)"""


FIRST_TURN = 1
"""The number of a run's first turn on shared devices: servers sleep, by its command, before ranks load their models."""


def learner_name(run_id: str, incarnation: int) -> str:
    """Return how servers tell one start of a run from every other."""
    return f"{run_id}/{incarnation}"


class ServerControls(Protocol):
    """The weight controls of one rollout server, as a push calls them.

    A call that the learner gives up is not taken back: it may come, or go on, when the next attempt has begun. So each
    call names its attempt. `join_weights` and `prepare` begin one, and end what runs of earlier ones; every call of
    another attempt than the newest, or of another learner than the attached run's, is refused.
    """

    @property
    def name(self) -> str: ...

    async def join_weights(self, attempt: Attempt, init: dict[str, Any], timeout_s: float) -> None:
        """As `WeightControls.join_weights`."""
        ...

    async def sleep(self, attempt: Attempt) -> None:
        """As `WeightControls.sleep`. Turns on the device are numbered by themselves: each call is a new attempt."""
        ...

    async def wake(self, attempt: Attempt) -> None:
        """As `WeightControls.wake`. A `sleep` that came before and still goes on ends first."""
        ...

    async def prepare(self, attempt: Attempt, update: dict[str, Any]) -> None:
        """As `WeightControls.prepare`."""
        ...

    async def receive(self, attempt: Attempt) -> None:
        """As `WeightControls.receive`."""
        ...

    async def commit(self, attempt: Attempt, version: int, digest: str) -> float:
        """As `WeightControls.commit`."""
        ...

    async def probe(self, attempt: Attempt, tokens: list[int]) -> list[float]:
        """As `WeightControls.probe`."""
        ...

    async def serve(self, attempt: Attempt, version: int) -> None:
        """Use the committed version from now on: what it computes is what the learner computes.

        Until then no turn begins, and none that has tokens of it ends. Raises when another version is held.
        """
        ...

    async def leave(self, attempt: Attempt) -> None:
        """As `WeightControls.leave`."""
        ...

    async def ping(self) -> None:
        """Return at once: the server can be reached and its event loop turns."""
        ...


VERBS = ("join_weights", "sleep", "prepare", "receive", "commit", "wake", "probe", "serve", "leave", "ping")
"""Every verb of `ServerControls`, for who passes them on."""
