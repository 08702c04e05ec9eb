"""One run on a rollout server, from attach to detach: leases in, trajectories out.

Two tasks of one event loop share the socket: one receives the coordinator's messages, the other sends what is due.

    Lease -> SamplesInFlight (a Player per sample) -> Outbox -> TrajectoryDone | SampleFailed
                                                           Outbox <- Ack, GroupsTrained
    Demand = room for groups: max_groups_in_flight less the groups here; 0 while no sample could finish
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

from protocol.errors import FrameError
from protocol.settings.run_spec import RunSpec
from protocol.settings.section import LARGEST_COUNT
from protocol.wire import messages as m
from rollout.engine.version_gate import VersionGate
from rollout.episodes.sample import Generator, Player
from rollout.session.link import Channel, CoordinatorLink
from rollout.session.outbox import FailureCounts, Outbox
from rollout.session.samples_in_flight import SampleAttachment, SamplesInFlight
from rollout.session.turns_to_keep import TurnsToKeep

_log = logging.getLogger(__name__)
_TICK_S = 0.25  # longest pause between two looks at due messages
_CONNECT_TICK_S = 0.02  # the same before the first Hello
_ATTACHMENTS = (TurnsToKeep,)  # optional features: each is one file and one entry here


class Neighbours(Protocol):
    """The services that samples need: `rollout.neighbours.services.Services`."""

    @property
    def is_accepting(self) -> bool: ...


class RolloutSession:
    """Serves one run. `await run()` until it is cancelled, or returns because a later start of the run took over."""

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
        self._attachments: list[SampleAttachment] = [
            kind(spec, clock, self.wake, self._stop_sample) for kind in _ATTACHMENTS
        ]
        self._samples = SamplesInFlight(
            player, outbox, self.failures, spec.rollout, self.wake, lambda: engine.is_alive, self._attachments
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
                await self._link.send_finished(self.outbox)
                await self._send_for_attachments()
                await self._link.send_demand(self._room(), self._served_version, self._samples.unfinished_groups())
                await self._link.send_heartbeat(self._heartbeat)
                await self._wait_for_event()
            receiving.cancel()
            self._samples.cancel()
        return self._link.refusal

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
