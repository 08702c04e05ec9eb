"""The session's messages to and from the coordinator: greeting, finished samples, demand, heartbeat."""

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Protocol, TypedDict

import msgspec

from protocol.settings.run_spec import RunSpec
from protocol.settings.section import LARGEST_COUNT
from protocol.wire import messages as m
from protocol.wire.codec import Decoder, encode
from rollout.session.outbox import FinishedSample, Item, Outbox

_BEAT_EVERY_S = 1.0
_HELLO_EVERY_S = 5.0
_POLL_S = 1.0
# A coordinator pings every second. After this silence nothing more is sent: the coordinator has ended, or the earlier
# messages still wait in its memory.
_SILENT_S = 10.0


class Channel(Protocol):
    """The socket to the coordinator: `protocol.wire.channel.AsyncDealerChannel`."""

    @property
    def is_connected(self) -> bool: ...

    async def send(self, frames: list[bytes]) -> bool: ...

    async def receive(self, timeout_s: float) -> list[bytes] | None: ...


class _Stamp(TypedDict):
    run_id: str
    incarnation: int


class CoordinatorLink:
    """Sends each message when it is due, and decodes the coordinator's messages."""

    def __init__(self, server: str, spec: RunSpec, channel: Channel, clock: Callable[[], float]) -> None:
        self.is_welcome = False  # True once the coordinator has answered
        self.refusal: str | None = None  # reason why this run is over for the server
        self.newest_lease = 0  # number of the newest lease that the coordinator has sent
        self._server = server
        self._address = spec.coordinator_address
        self.stamp: _Stamp = {"run_id": spec.run_id, "incarnation": spec.incarnation}
        self._channel = channel
        self._clock = clock
        self._decoder: Decoder[m.Message] = Decoder(m.ToServer | m.Done)
        self._demand: tuple[int, int | None, int] | None = None  # the demand sent last
        self._demanded_at = self._beat_at = self._greeted_at = self._heard_at = float("-inf")

    @property
    def has_greeted(self) -> bool:
        """True once a Hello was sent."""
        return self._greeted_at > float("-inf")

    async def receive(self) -> tuple[m.Message, list[bytes]] | None:
        """Return the next message of this run with its buffers; None after a second without one.

        A refusal by the coordinator of another run is recorded in `refusal`. Raises: FrameError.
        """
        frames = await self._channel.receive(_POLL_S)
        if frames is None:
            return None
        message, buffers = self._decoder.decode(frames)
        if (message.run_id, message.incarnation) != (self.stamp["run_id"], self.stamp["incarnation"]):
            # Another run's coordinator has the address: it will attach this server, or never knew it.
            if isinstance(message, m.Refusal):
                self.refusal = f"the coordinator at {self._address} refused: {message.detail}"
            return None
        self.is_welcome, self._heard_at = True, self._clock()
        match message:
            case m.Lease():
                self.newest_lease = max(self.newest_lease, message.number)
            case m.Ping():
                self.newest_lease = max(self.newest_lease, message.newest_lease)
        return message, buffers

    async def greet(self, policy_version: int | None) -> None:
        """Send Hello until the coordinator answers. A later Hello would return every lease: it means a restart."""
        if self.is_welcome or self._clock() - self._greeted_at < _HELLO_EVERY_S:
            return
        hello = m.Hello(**self.stamp, server=self._server, policy_version=policy_version)
        if await self._channel.send(encode(hello)):
            self._greeted_at = self._clock()

    async def send_finished(self, outbox: Outbox) -> None:
        """Send the due items, and resend unanswered ones, while the coordinator is there."""
        if self.is_welcome and self._channel.is_connected and self._clock() - self._heard_at < _SILENT_S:
            for item in outbox.due(self._clock()):
                await self._send_item(item)

    async def send_demand(self, num_groups: int, policy_version: int | None, leases: Mapping[str, int]) -> None:
        """Send the room for groups, and the groups that are here with their attempts.

        It is sent after each change, and every second, because a message can be lost.
        """
        demand = (num_groups, policy_version, self.newest_lease)
        is_due = demand != self._demand or self._clock() - self._demanded_at >= _BEAT_EVERY_S
        if not self.is_welcome or not is_due:
            return
        self._demand, self._demanded_at = demand, self._clock()
        await self.send(
            m.Demand(
                **self.stamp,
                num_groups=num_groups,
                policy_version=policy_version,
                heard_of_lease=self.newest_lease,
                # A group beyond the limit is leased again: its work is lost, nothing else.
                leases=dict(islice(leases.items(), m.MAX_GROUPS)),
            )
        )

    async def send_heartbeat(self, heartbeat: Callable[[], m.Heartbeat]) -> None:
        """Send a heartbeat every second."""
        if self.is_welcome and self._clock() - self._beat_at >= _BEAT_EVERY_S:
            self._beat_at = self._clock()
            await self.send(heartbeat())

    async def send(self, message: m.Message, buffers: Sequence[bytes] = ()) -> None:
        await self._channel.send(encode(message, buffers))

    async def _send_item(self, item: Item) -> None:
        if isinstance(item, FinishedSample):
            message = m.TrajectoryDone(**self.stamp, facts=item.trajectory.facts)
            await self.send(message, item.trajectory.to_buffers())
            return
        group, sample_index, _, attempt = item.key
        await self.send(
            m.SampleFailed(
                **self.stamp,
                group=group,
                sample_index=sample_index,
                attempt=attempt,
                boundary=item.boundary[:200],
                detail=item.detail[:2000],
                num_model_tokens=min(item.num_model_tokens, LARGEST_COUNT),
                place=item.place or msgspec.UNSET,
            )
        )
