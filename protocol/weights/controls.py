"""The verbs by which a learner changes a rollout server's weights: an engine has them, a server, and its handle."""

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

    async def probe(self, tokens: list[int]) -> list[float]:
        """Return the logprobs of tokens[1:] under the version held, natural log at temperature 1."""
        ...

    async def leave(self) -> None:
        """Leave the broadcast group; with intact weights, generation goes on."""
        ...


class ServerControls(WeightControls, Protocol):
    """The weight controls of one rollout server, as a push calls them."""

    @property
    def name(self) -> str: ...

    async def serve(self, version: int) -> None:
        """Use the committed version from now on: what it computes is what the learner computes.

        Until then no turn begins, and none that has tokens of it ends. Raises when another version is held.
        """
        ...

    async def ping(self) -> None:
        """Return at once: the server can be reached and its event loop turns."""
        ...


VERBS = ("join_weights", "prepare", "receive", "commit", "probe", "serve", "leave", "ping")
"""Every verb of `ServerControls`, for who passes them on."""
