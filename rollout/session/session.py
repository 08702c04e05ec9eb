"""One run on a rollout server, from attach to detach: leases in, trajectories out.

Two tasks of one event loop share the socket: one receives the coordinator's messages, the other sends what is due.
`CoordinatorLink` knows when a message is due.

    Lease -> SamplesInFlight (a Player per sample) -> Outbox -> TrajectoryDone | SampleFailed
                                                           Outbox <- Ack, GroupsTrained
    Demand = room for groups: places of the engine less the samples here; 0 while no sample could finish
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Protocol, TypedDict

import msgspec

from protocol.errors import FrameError
from protocol.settings.run_spec import RunSpec
from protocol.settings.section import LARGEST_COUNT
from protocol.wire import messages as m
from protocol.wire.codec import Decoder, encode
from rollout.engine.version_gate import VersionGate
from rollout.episodes.conversation import Generator, Player
from rollout.session.outbox import FailureCounts, FinishedSample, Item, Outbox
from rollout.session.samples_in_flight import DEFAULT_RUNNING, Places, SampleAttachment, SamplesInFlight
from rollout.session.tokens_to_book import TokensToBook
from rollout.session.turns_to_keep import TurnsToKeep

_log = logging.getLogger(__name__)
_TICK_S = 0.25  # longest pause between two looks at due messages
_CONNECT_TICK_S = 0.02  # the same before the first Hello
_BEAT_EVERY_S = 1.0
_HELLO_EVERY_S = 5.0
_POLL_S = 1.0
# A coordinator pings every second. After this silence nothing more is sent: the coordinator has ended, or the earlier
# messages still wait in its memory.
_SILENT_S = 10.0
_LAST_WORD_S = 15.0  # longest wait at the end of a session for the answer to its last counts


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


class RolloutSession:
    """Serves one run. `await run()` until it is cancelled, or returns because a later start of the run took over.

    Then `await close()`.
    """

    def __init__(
        self,
        server: str,
        spec: RunSpec,
        channel: Channel,
        player: Player,
        engine: Generator,
        services: Neighbours,
        outbox: Outbox,
        clock: Callable[[], float] = time.monotonic,
        gate: VersionGate | None = None,
    ) -> None:
        """outbox: empty, or the items of an earlier start of the run; all of them are sent again.

        gate: pauses turns while weights change; None: no pauses.
        """
        self.spec = spec
        self.outbox = outbox
        self.failures = FailureCounts(_log, server, clock)
        self._engine = engine
        self._services = services
        self._gate = gate
        self._link = CoordinatorLink(server, spec, channel, clock)
        self._tokens_before = engine.stats.num_output_tokens
        self._is_woken = asyncio.Event()
        self._books = TokensToBook(spec, clock, server, engine)
        # Optional features: each is one file and one entry here.
        turns = TurnsToKeep(spec, clock, self.wake, self._stop_sample, self._books.messages_of)
        self._attachments: list[SampleAttachment] = [turns, self._books]
        stats = engine.stats
        limits = Places(stats.max_running or DEFAULT_RUNNING, stats.cache_tokens, shares_prompts=stats.shares_prompts)
        self._samples = SamplesInFlight(
            player, outbox, self.failures, spec.rollout, self.wake, lambda: engine.is_alive, self._attachments, limits
        )

    @property
    def is_welcome(self) -> bool:
        """True once the coordinator has answered."""
        return self._link.is_welcome

    @property
    def num_groups(self) -> int:
        """Groups with a sample in flight, and groups that wait for room."""
        return self._samples.num_groups

    @property
    def num_samples(self) -> int:
        """Samples in flight."""
        return self._samples.num_samples

    async def run(self) -> str:
        """Serve the run; return the reason of its end. Cancelling stops every sample in flight.

        Raises: ExceptionGroup for an error of this server. A neighbour's failure never ends a session.
        """
        self.outbox.send_all_again()
        async with asyncio.TaskGroup() as tasks:
            receiving = tasks.create_task(self._receive_all())
            while self._link.refusal is None:
                self._is_woken.clear()
                self._samples.admit(tasks)
                await self._link.greet(self._served_version)
                await self._send_for_attachments()  # first: the books have a sample's tokens before its result
                await self._link.send_finished(self.outbox)
                await self._link.send_demand(self._room(), self._served_version, self._samples.unfinished_groups())
                await self._link.send_heartbeat(self._heartbeat)
                await self._wait_for_event()
            receiving.cancel()
            self._samples.cancel()
        return self._link.refusal

    async def close(self) -> None:
        """After `run`: send the counts of the samples that were stopped, and wait a moment for the answer."""
        received = None
        self._books.finish()
        try:
            async with asyncio.timeout(_LAST_WORD_S):
                while self._link.is_heard and not self._books.is_booked:
                    if received is None:  # at first, and after a second without an answer
                        self._books.finish()
                        await self._send_for_attachments()
                        if not self._link.is_heard:
                            break
                    with suppress(FrameError):
                        received = await self._link.receive()
                    if received is not None:
                        self._books.on_message(received[0])
        except TimeoutError:
            pass  # the next session of the run on this node sends them
        finally:
            self._books.close()

    def wake(self) -> None:
        """Send due messages now: a sample has finished, or the engine's weights have changed."""
        self._is_woken.set()

    async def _receive_all(self) -> None:
        while True:
            try:
                received = await self._link.receive()
                if received is not None:
                    self._take(*received)
                elif self._link.refusal is not None:
                    self.wake()
            except FrameError as error:
                self.failures.add("coordinator", str(error), "the message was not used")

    def _take(self, message: m.Message, buffers: list[bytes]) -> None:
        """Act on a message. Raises: FrameError for a lease with inconsistent buffers."""
        match message:
            case m.Lease():
                self._samples.add(message, buffers)
                self.wake()
            case m.Ack():
                self._acknowledge(message)
            case m.GroupsTrained():
                self.outbox.mark_trained(message.groups)
            case m.Refusal():
                self.failures.add("coordinator", message.detail, "a message was not used")
            case m.Done():
                self.wake()
        for attachment in self._attachments:
            attachment.on_message(message)

    def _acknowledge(self, message: m.Ack) -> None:
        if message.outcome in ("rejected", "refused"):
            detail = f"{message.group}[{message.sample_index}] was {message.outcome}: {message.detail}"
            self.failures.add("trajectory", detail, "its part of the lease went back")
        self.outbox.acknowledge(message.group, message.sample_index, message.outcome)

    def _stop_sample(self, group: str, sample_index: int, attempt: int) -> None:
        self._samples.stop(group, sample_index, attempt)

    async def _send_for_attachments(self) -> None:
        if self.is_welcome:
            for attachment in self._attachments:
                for message, buffers in attachment.due_messages():
                    await self._link.send(message, buffers)

    def _room(self) -> int:
        """Return the number of further groups to lease."""
        if self._served_version is None or not self._services.is_accepting:
            return 0
        return self._samples.room

    @property
    def _served_version(self) -> int | None:
        """The verified version of the weights; None without one."""
        return self._engine.policy_version if self._gate is None or self._gate.is_open else None

    def _heartbeat(self) -> m.Heartbeat:
        stats = self._engine.stats
        return m.Heartbeat(
            **self._link.stamp,
            policy_version=self._served_version,
            num_groups=self.num_groups,
            num_running=stats.num_in_flight,
            num_waiting=max(0, self.num_samples - stats.num_in_flight),
            generated_tokens=min(stats.num_output_tokens - self._tokens_before, LARGEST_COUNT),
            failures=dict(self.failures.totals),
        )

    async def _wait_for_event(self) -> None:
        """Return after a message or a finished sample, at the latest after a tick."""
        try:
            async with asyncio.timeout(_TICK_S if self._link.has_greeted else _CONNECT_TICK_S):
                await self._is_woken.wait()
        except TimeoutError:
            pass


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

    @property
    def is_heard(self) -> bool:
        """Whether the coordinator is there."""
        is_silent = self._clock() - self._heard_at >= _SILENT_S
        return self.is_welcome and self._channel.is_connected and not is_silent and self.refusal is None

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
        if self.is_heard:
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
