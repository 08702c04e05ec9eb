"""An engine that writes at a given pace and whose weights come by real pushes: gloo, wire and digest, plain tensors."""

from typing import Any

from tests.chaos.rig.receiving_server import ReceivingServer
from tests.chaos.rig.scripted_engine import PacedEngine

_ATTEMPT = ("", 0)  # its receiver does not ask whose call it is


class PushedEngine(PacedEngine):
    """As a real engine, it takes a version once its digest was confirmed, and holds none when it was refused."""

    def __init__(self, name: str, seed: int, token_s: float, mean_tokens: float) -> None:
        super().__init__(seed, token_s, mean_tokens)
        self._receiver = ReceivingServer(name)

    async def join_weights(self, init: dict[str, Any], timeout_s: float) -> None:
        await self._receiver.join_weights(_ATTEMPT, init, timeout_s)

    async def prepare(self, update: dict[str, Any]) -> None:
        await self._receiver.prepare(_ATTEMPT, update)

    async def receive(self) -> None:
        await self._receiver.receive(_ATTEMPT)

    async def commit(self, version: int, digest: str) -> float:
        self.policy_version = None
        pause_s = await self._receiver.commit(_ATTEMPT, version, digest)
        self.policy_version = version
        return pause_s

    async def leave(self) -> None:
        await self._receiver.leave(_ATTEMPT)
