"""What a session needs of the socket and the services around it."""

from typing import Protocol


class Channel(Protocol):
    """The socket to the coordinator: `protocol.wire.channel.AsyncDealerChannel`."""

    @property
    def is_connected(self) -> bool: ...

    async def send(self, frames: list[bytes]) -> bool: ...

    async def receive(self, timeout_s: float) -> list[bytes] | None: ...


class Neighbours(Protocol):
    """The services that samples need: `rollout.neighbours.services.Services`."""

    @property
    def is_accepting(self) -> bool: ...
