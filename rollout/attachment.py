"""A run attached to a rollout server: its socket, services and session, which begin and end together."""

import asyncio
from dataclasses import dataclass
from typing import Any, NamedTuple

from protocol.settings.run_spec import RunSpec
from protocol.wire.channel import AsyncDealerChannel
from rollout.endpoint.player import AgentPlayer
from rollout.engine.version_gate import VersionGate
from rollout.environments.agents import PlayedByAgents
from rollout.episodes.conversation import Generator
from rollout.episodes.player import EpisodePlayer
from rollout.neighbours.node import Node
from rollout.neighbours.services import Services
from rollout.session.outbox import Outbox
from rollout.session.session import Neighbours, RolloutSession


class KeptOutbox(NamedTuple):
    """Finished results of a run, for a later start of the same run."""

    made_for: RunSpec  # start of a run
    outbox: Outbox  # results that were not trained yet

    def is_usable_by(self, spec: RunSpec) -> bool:
        """Return whether a start is the same one or a later one of the same run.

        A run of that name in another folder counts its starts from 1 again.
        """
        before = self.made_for
        is_later = before.incarnation < spec.incarnation or before.coordinator_address == spec.coordinator_address
        return before.run_id == spec.run_id and is_later


@dataclass
class Attachment:
    """A run that is being served."""

    session: RolloutSession
    task: asyncio.Task[str]  # its result is the reason for the session's end
    channel: AsyncDealerChannel
    services: Services
    player: EpisodePlayer | AgentPlayer  # makes its samples

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the session."""
        return self.task.exception() if self.task.done() and not self.task.cancelled() else None

    async def end(self) -> KeptOutbox:
        """Stop all samples and close the socket, the player and the services."""
        self.task.cancel()
        await asyncio.wait([self.task])
        await self.session.close()
        self.channel.close()
        if isinstance(self.player, AgentPlayer):
            await self.player.close()
        await self.services.close()
        return KeptOutbox(self.session.spec, self.session.outbox)

    def describe(self) -> dict[str, Any]:
        """Return `run` of `RolloutServer.describe`. ended: reason when the session ended by itself."""
        session, task, player = self.session, self.task, self.player
        has_ended = task.done() and not task.cancelled() and self.failure is None
        facts: dict[str, Any] = {
            "run_id": session.spec.run_id,
            "incarnation": session.spec.incarnation,
            "is_connected": session.is_welcome,
            "num_groups": session.num_groups,
            "num_samples": session.num_samples,
            "num_kept": len(session.outbox),
            "failures": dict(session.failures.totals),
            "content_hash": self.services.content_hash,
            "tools_digest": self.services.tools_digest,
            "ended": task.result() if has_ended else None,
        }
        if isinstance(player, AgentPlayer):
            facts |= {"base_url": player.base_url, "dropped_conversations": player.num_dropped_conversations}
        return facts


@dataclass(frozen=True)
class _NeighboursWithAgents:
    """The services and the agents: samples are requested while both accept work."""

    services: Services
    player: AgentPlayer

    @property
    def is_accepting(self) -> bool:
        return self.services.is_accepting and self.player.is_accepting


async def begin_attachment(
    server: str,
    spec: RunSpec,
    node: Node,
    services: Services,
    engine: Generator,
    gate: VersionGate,
    finished: KeptOutbox | None,
) -> Attachment:
    """Return the run's attachment, already at work. finished: results of the previous run, kept if it is the same."""
    made_by, rewards = services.make_environment, services.rewards
    player: EpisodePlayer | AgentPlayer
    neighbours: Neighbours = services
    if isinstance(made_by, PlayedByAgents):
        player = await AgentPlayer.open(engine, gate, made_by.program, rewards, spec, server, node.token)
        neighbours = _NeighboursWithAgents(services, player)
    else:
        player = EpisodePlayer(engine, gate, made_by, services.resources, rewards, spec.rollout, server, spec.sampling)
    channel = AsyncDealerChannel(spec.coordinator_address, server, node.keys.peer, node.keys.coordinator.public)
    outbox = finished.outbox if finished is not None and finished.is_usable_by(spec) else Outbox()
    session = RolloutSession(server, spec, channel, player, engine, neighbours, outbox, gate=gate)
    task = asyncio.create_task(session.run(), name=f"session {spec.run_id}")
    return Attachment(session, task, channel, services, player)
