"""An engine that writes at a given pace and whose weights come by real pushes: gloo, wire and digest, plain tensors."""

from typing import Any

from protocol.errors import NeighbourError
from tests.chaos.rig.receiving_server import ReceivingServer
from tests.chaos.rig.scripted_engine import PacedEngine


class PushedEngine(PacedEngine):
    """As a real engine, it holds no version from a push's first byte until its digest was confirmed."""

    def __init__(self, name: str, seed: int, token_s: float, mean_tokens: float) -> None:
        super().__init__(seed, token_s, mean_tokens)
        self._receiver = ReceivingServer(name)

    async def join_weights(self, init: dict[str, Any], timeout_s: float) -> None:
        await self._receiver.join_weights(init, timeout_s)

    async def receive(self, update: dict[str, Any]) -> None:
        self.policy_version = None
        await self._receiver.receive(update)

    async def commit(self, version: int, digest: str) -> None:
        await self._receiver.commit(version, digest)
        self.policy_version = version

    async def resume(self) -> None:
        if self.policy_version is None:
            raise NeighbourError("engine", "cannot resume: its weights were not verified")
        await super().resume()

    async def leave(self) -> None:
        await self._receiver.leave()
        if self.policy_version is not None:
            await super().leave()
