"""One run on a rollout server, from attach to detach: leases in, trajectories out.

Two loops in one event loop share the socket: one takes in what the coordinator says, the other sends it what there is
to say; between them stand the samples in flight.

    Lease -> SamplesInFlight (a Player per sample) -> Outbox -> TrajectoryDone | SampleFailed
                                                           Outbox <- Ack, Trained
    Demand = room for groups: max_groups_in_flight less those here, 0 when nothing could be made of them
"""

import asyncio
import logging
import time
from collections.abc import Callable
from itertools import islice
from typing import TypedDict

from protocol.errors import FrameError
from protocol.settings.run_spec import RunSpec
from protocol.wire import messages as m
from protocol.wire.codec import Decoder, encode
from rollout.engine.version_gate import VersionGate
from rollout.episodes.sample import Generator, Player
from rollout.session.failure_counts import FailureCounts
from rollout.session.needs import Channel, Neighbours
from rollout.session.outbox import Finished, Item, Outbox
from rollout.session.samples_in_flight import SamplesInFlight

_log = logging.getLogger(__name__)
_TICK_S = 0.25
_BEAT_EVERY_S = 1.0
_HELLO_EVERY_S = 5.0
_POLL_S = 1.0
# How often it is looked whether there is a connection to say Hello on.
_CONNECT_TICK_S = 0.02
# A coordinator pings every second. One that was not heard for so long gets nothing more: it has ended, or what it was
# sent already waits in its memory.
_SILENT_S = 10.0


class _Stamp(TypedDict):
    run_id: str
    incarnation: int


class RolloutSession:
    """`await run()` until it is cancelled, or returns because the coordinator speaks for a later start of the run."""

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
        """outbox: empty, or what an earlier start of the same run left here; all of it is sent again.

        gate: where turns wait while weights change; None: they never do.
        """
        self.spec = spec
        self.outbox = outbox
        self.failures = FailureCounts(_log, server)
        self._server = server
        self._channel = channel
        self._engine = engine
        self._services = services
        self._gate = gate
        self._clock = clock
        self._decoder: Decoder[m.Message] = Decoder(m.ToServer | m.Done)
        self._tokens_before = engine.stats.num_output_tokens
        self._news = asyncio.Event()
        self._samples = SamplesInFlight(
            player, outbox, self.failures, spec.rollout, clock, self.wake, lambda: engine.is_alive
        )
        self._is_welcome = False
        self._refusal: str | None = None
        self._heard_of_lease = 0
        self._demanded: tuple[int, int | None, int] | None = None
        self._demanded_at = self._beat_at = self._greeted_at = self._heard_at = float("-inf")

    @property
    def is_welcome(self) -> bool:
        """True once the coordinator has answered."""
        return self._is_welcome

    @property
    def _served_version(self) -> int | None:
        """The version that turns are written with; None while there is none, and until it was verified."""
        return self._engine.policy_version if self._gate is None or self._gate.is_open else None

    @property
    def num_groups(self) -> int:
        """Groups here: with a sample in flight, or waiting for room."""
        return self._samples.num_groups

    @property
    def num_samples(self) -> int:
        """Samples in flight."""
        return self._samples.num_samples

    async def run(self) -> str:
        """Serve the run; returns why it ended by itself. Cancelling stops every sample in flight.

        Raises: ExceptionGroup when something here is wrong (a neighbour's failure never ends a session).
        """
        self.outbox.send_all_again()
        async with asyncio.TaskGroup() as tasks:
            receiving = tasks.create_task(self._receive_all())
            while self._refusal is None:
                self._news.clear()
                self._samples.admit(tasks)
                await self._say_hello()
                await self._send_finished()
                await self._send_turns()
                await self._send_demand()
                await self._send_heartbeat()
                await self._await_news()
            receiving.cancel()
            self._samples.cancel()
        return self._refusal

    def wake(self) -> None:
        """Have the coordinator told at once what changed: the engine has other weights, or none."""
        self._news.set()

    # -- from the coordinator -----------------------------------------------------------------------------------------

    async def _receive_all(self) -> None:
        while True:
            frames = await self._channel.receive(_POLL_S)
            if frames is not None:
                self._receive(frames)

    def _receive(self, frames: list[bytes]) -> None:
        try:
            message, buffers = self._decoder.decode(frames)
            self._take(message, buffers)
        except FrameError as error:
            self.failures.add("coordinator", str(error), "the message was not used", self._clock())

    def _take(self, message: m.Message, buffers: list[bytes]) -> None:
        """Do what a message says. Raises: FrameError for a lease whose buffers are not what it says."""
        if (message.run_id, message.incarnation) != (self.spec.run_id, self.spec.incarnation):
            self._on_other_run(message)
            return
        self._is_welcome = True
        self._heard_at = self._clock()
        match message:
            case m.Lease():
                self._heard_of_lease = max(self._heard_of_lease, message.number)
                self._samples.add(message, buffers)
                self._news.set()
            case m.Ping():
                self._heard_of_lease = max(self._heard_of_lease, message.newest_lease)
            case m.Ack():
                self._on_ack(message)
            case m.TurnsKept():
                for one in self._samples.turns.on_kept(message.samples):
                    self._samples.stop(one.group, one.sample_index, one.attempt)
            case m.Trained():
                self.outbox.mark_trained(message.groups)
            case m.Refused():
                self.failures.add("coordinator", message.detail, "a message of ours was not used", self._clock())
            case m.Done():
                self._news.set()

    def _on_other_run(self, message: m.Message) -> None:
        """End when the coordinator at our address is another one: its run attaches us anew, or never did."""
        if isinstance(message, m.Refused):
            self._refusal = f"the coordinator at {self.spec.coordinator_address} refused: {message.detail}"
            self._news.set()

    def _on_ack(self, message: m.Ack) -> None:
        if message.outcome in ("rejected", "refused"):
            detail = f"{message.group}[{message.sample_index}] was {message.outcome}: {message.detail}"
            self.failures.add("trajectory", detail, "its part of the lease went back", self._clock())
        self.outbox.acknowledge(message.group, message.sample_index, message.outcome)

    # -- to the coordinator -------------------------------------------------------------------------------------------

    async def _say_hello(self) -> None:
        """Greet until the coordinator answers. Later a Hello would take every lease back: it means a fresh start."""
        if self._is_welcome or self._clock() - self._greeted_at < _HELLO_EVERY_S:
            return
        hello = m.Hello(**self._stamp(), server=self._server, policy_version=self._served_version)
        if await self._channel.send(encode(hello)):
            self._greeted_at = self._clock()

    async def _send_finished(self) -> None:
        """Send what is due, and send again what was not answered, while somebody hears it."""
        if self._is_welcome and self._channel.is_connected and self._clock() - self._heard_at < _SILENT_S:
            for item in self.outbox.due(self._clock()):
                await self._send_item(item)

    async def _send_turns(self) -> None:
        """Send turns of samples that go on, for whoever would have to go on with them."""
        if self._is_welcome:
            for parts, buffers in self._samples.turns.due():
                await self._channel.send(encode(m.TurnsDone(**self._stamp(), parts=parts), buffers))

    async def _send_item(self, item: Item) -> None:
        if isinstance(item, Finished):
            message = m.TrajectoryDone(**self._stamp(), facts=item.trajectory.facts)
            await self._channel.send(encode(message, item.trajectory.to_buffers()))
            return
        group, sample_index, _, attempt = item.key
        await self._send(
            m.SampleFailed(
                **self._stamp(),
                group=group,
                sample_index=sample_index,
                attempt=attempt,
                boundary=item.boundary[:200],
                detail=item.detail[:2000],
                num_model_tokens=min(item.num_model_tokens, 2**31 - 1),
            )
        )

    async def _send_demand(self) -> None:
        """Tell how many groups could come and which are here: when that changed, and every second, since a message can
        be lost."""
        demand = (self._room(), self._served_version, self._heard_of_lease)
        is_news = demand != self._demanded or self._clock() - self._demanded_at >= _BEAT_EVERY_S
        if not self._is_welcome or not is_news:
            return
        self._demanded, self._demanded_at = demand, self._clock()
        num_groups, version, heard_of = demand
        await self._send(
            m.Demand(
                **self._stamp(),
                num_groups=num_groups,
                policy_version=version,
                heard_of_lease=heard_of,
                # One that is left out goes out again, which costs its work and no more.
                leases=dict(islice(self._samples.unfinished().items(), m.MAX_GROUPS)),
            )
        )

    def _room(self) -> int:
        if self._served_version is None or not self._services.is_accepting:
            return 0
        return self._samples.room

    async def _send_heartbeat(self) -> None:
        if not self._is_welcome or self._clock() - self._beat_at < _BEAT_EVERY_S:
            return
        self._beat_at = self._clock()
        stats = self._engine.stats
        await self._send(
            m.Heartbeat(
                **self._stamp(),
                policy_version=self._served_version,
                num_groups=self.num_groups,
                num_running=stats.num_in_flight,
                num_waiting=max(0, self.num_samples - stats.num_in_flight),
                generated_tokens=min(stats.num_output_tokens - self._tokens_before, 2**31 - 1),
                failures=dict(self.failures.totals),
            )
        )

    async def _await_news(self) -> None:
        """Return when something finished or arrived, or it is time to look what is due."""
        try:
            has_greeted = self._greeted_at > float("-inf")
            async with asyncio.timeout(_TICK_S if has_greeted else _CONNECT_TICK_S):
                await self._news.wait()
        except TimeoutError:
            pass

    async def _send(self, message: m.Message) -> None:
        await self._channel.send(encode(message))

    def _stamp(self) -> _Stamp:
        return {"run_id": self.spec.run_id, "incarnation": self.spec.incarnation}
