"""The processes of a rigged run over two hosts: servers here and there, and a learner that pushes to them over gloo."""

import asyncio
import os
from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch

from learner.run.start import RunStart
from learner.weights.push import WeightPusher
from protocol.node.home import Keys
from protocol.settings.run_spec import EngineRequest
from protocol.settings.settings import Settings
from protocol.weights.controls import learner_name
from rollout.neighbours.node import Node
from rollout.server import RolloutServer
from tests.chaos.rig.control_line import ControlLine, serve_controls
from tests.chaos.rig.processes import ENGINE, CountingLearner, Pace, obey
from tests.chaos.rig.receiving_server import ReceivingServer
from tests.chaos.rig.run import Parts
from tests.chaos.rig.two_hosts import TwoHosts
from tests.fakes.engines import PushedEngine
from tests.fakes.planned_weights import planned

_FIRST_PORT = 7100
_WEIGHT_BYTES = 1 << 20
_BUCKET_BYTES = 1 << 18


def hosted_parts(hosts: TwoHosts, is_far: dict[str, bool]) -> Parts:
    """Return the parts of a run whose coordinator and learner are on the near host. is_far: of each server by name."""
    where = {
        name: (hosts.far_address if far else hosts.near_address, _FIRST_PORT + number)
        for number, (name, far) in enumerate(is_far.items())
    }

    def serve(pipe: Connection, name: str, node: Node, pace: Pace) -> None:
        if is_far[name]:
            hosts.enter(hosts.far)
        asyncio.run(_serve(pipe, name, node, pace, where[name]))

    def learn(
        pipe: Connection, settings: Settings, start: RunStart, coordinator: tuple[str, int], keys: Keys, pace: Pace
    ) -> None:
        learner = _PushingLearner(pipe, settings, start, coordinator, keys)
        learner.pusher = WeightPusher(
            [ControlLine(name, *address) for name, address in where.items()],
            hosts.near_address,
            "gloo",
            settings.weights.deadline_s,
            learner=learner_name(start.run_id, coordinator[1]),
        )
        pipe.send(("ended", learner.train(pace.step_s)))

    return Parts(serve, learn, hosts.near_address)


async def _serve(pipe: Connection, name: str, node: Node, pace: Pace, where: tuple[str, int]) -> None:
    async def start_engine(_: EngineRequest) -> PushedEngine:
        return PushedEngine(ReceivingServer(name), pace.seed ^ os.getpid(), pace.token_s, pace.mean_tokens)

    server = RolloutServer(name, ENGINE, start_engine, lambda: node)
    await serve_controls(server, *where)
    await obey(pipe, server)


class _PushingLearner(CountingLearner):
    """Has the product's own pusher bring each version to the servers; the weights are the version, many times."""

    pusher: WeightPusher

    def set_absent(self, absent: Sequence[str]) -> None:
        self.pusher.set_absent(absent)

    def push(self) -> None:
        weights = torch.full((_WEIGHT_BYTES // 4,), float(self.version))
        report = self.pusher.push(self.version, *planned([("weights", weights)], _BUCKET_BYTES))
        self.pusher.verify(self.version)
        self.pipe.send(("weights", self.version, report.push_s, report.synced, report.failed))
