"""What goes wrong in the middle of a weight push, and a server that it goes wrong on.

Each fault strikes one push; what it leaves behind is what a server has to cope with.
"""

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, TypeVar

from torch import Tensor

from protocol.weights.controls import Attempt
from protocol.weights.group import BroadcastGroup

T = TypeVar("T")
Buckets = Iterator[Sequence[tuple[str, Tensor]]]

FAULTS = (
    "learner_breaks_off",  # the learner fails between two buckets
    "byte_flipped",  # another byte arrives than was sent
    "wrong_digest",  # the learner's digest is not that of what it sent
    "commit_lost",  # the commit never reaches the server
    "answer_lost",  # the server commits, and its answer never reaches the learner
    "prepare_fails",  # the server refuses the metadata
    "peer_leaves",  # the server leaves the group between join and push
    "prepare_hangs",  # the server does not answer within the deadline
    "receive_is_lost",  # all bytes arrive, and the learner does not hear of it
)


class FaultyServer:
    """A rollout server's weight controls on an engine of this process, with one fault at a time.

    Made in the engine's event loop; called from the pusher's. committed: version -> digest that the engine confirmed.
    """

    def __init__(self, engine: Any) -> None:
        self.name = "server"
        self.fault: str | None = None
        self.committed: dict[int, str] = {}
        self._engine = engine
        self._loop = asyncio.get_running_loop()

    async def ping(self) -> None:
        pass

    async def join_weights(self, attempt: Attempt, init: dict[str, Any], timeout_s: float) -> None:
        await self._there(self._engine.join_weights(init, timeout_s))

    async def prepare(self, attempt: Attempt, update: dict[str, Any]) -> None:
        if self.fault == "prepare_hangs":
            await asyncio.sleep(3600)
        if self.fault == "peer_leaves":
            await self._there(self._engine.leave())
        if self.fault == "prepare_fails":
            update = {**update, "names": update["names"][:-1]}
        await self._there(self._engine.prepare(update))

    async def receive(self, attempt: Attempt) -> None:
        await self._there(self._engine.receive())
        if self.fault == "receive_is_lost":
            raise ConnectionError("the answer to the call to receive was lost")

    async def commit(self, attempt: Attempt, version: int, digest: str) -> float:
        if self.fault == "commit_lost":
            raise ConnectionError("the commit was lost")
        digest = "0" * 64 if self.fault == "wrong_digest" else digest
        pause_s = await self._there(self._engine.commit(version, digest))
        self.committed[version] = digest
        if self.fault == "answer_lost":
            raise ConnectionError("the answer to the commit was lost")
        return pause_s

    async def probe(self, attempt: Attempt, tokens: list[int]) -> list[float]:
        return []

    async def serve(self, attempt: Attempt, version: int) -> None:
        pass

    async def leave(self, attempt: Attempt) -> None:
        await self._there(self._engine.leave())

    async def _there(self, call: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self._loop))


class FlippingGroup:
    """A broadcast group whose first bucket arrives with another byte than was sent."""

    def __init__(self, group: BroadcastGroup) -> None:
        self.device = group.device
        self._group = group
        self._is_first = True

    def broadcast(self, flat: Tensor) -> None:
        sent = flat.clone()
        if self._is_first:
            sent[len(sent) // 2] ^= 1
            self._is_first = False
        self._group.broadcast(sent)

    def close(self) -> None:
        self._group.close()


def breaking_off(buckets: Buckets) -> Buckets:
    """Yield the first buckets, then fail as a learner that lost a rank does."""
    for number, bucket in enumerate(buckets):
        if number == 3:
            raise RuntimeError("the learner failed between two buckets")
        yield bucket
