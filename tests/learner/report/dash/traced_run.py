"""A run folder of scripted samples with real tools and rewards over HTTP, and an OTLP receiver that decodes protobuf.

Every sample searches, asks a tool and is scored. Each 7th request to a service is answered 429, so the client repeats
it; one sample of each group fails once and is leased again. `python -m tests.learner.report.dash.traced_run DIR` writes
DIR/traced with 1,024 samples, to send to a collector of your own by `sluice traces`.
"""

import asyncio
import itertools
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from pydantic import HttpUrl
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from learner.coordinator.steps.record import RunRecord
from learner.coordinator.steps.step_batch import StepBatch
from learner.ledger.ledger import Ledger
from protocol.errors import NeighbourError
from protocol.settings.loader import save_settings
from protocol.settings.rewards import RewardEndpoint
from protocol.settings.rollout import RolloutSettings
from protocol.settings.settings import Settings
from protocol.settings.tools import HttpTool
from protocol.wire.trajectory import Trajectory
from rollout.engine.version_gate import VersionGate
from rollout.environments.base import Observation, Resources, Step, Task, Turn
from rollout.episodes.conversation import SampleTask
from rollout.episodes.player import EpisodePlayer
from rollout.neighbours.node import Node
from rollout.neighbours.reward_client import RewardClient
from rollout.neighbours.tools.http_tool import HttpToolClient
from rollout.neighbours.tools.search import SearchTool
from tests.fakes.engines import ScriptedEngine
from tests.fakes.http_servers import Answer, Received, ScriptedServer, scripted_server, serving
from tests.fakes.rollout_fakes import make_keys, make_spec

GROUP, SERVICES = 8, ("retrieve", "lookup", "score")
BUSY_EVERY, FAILS = 7, 5  # requests; index of the sample that fails once
_TRAIN_S, _PUSH_S = 0.02, 0.01


class LooksUp:
    """Searches, then asks the tool, then ends. A task with `fails` raises instead."""

    stop: tuple[str, ...] = ()
    requires = frozenset({"search", "lookup"})

    def __init__(self, resources: Resources) -> None:
        self._resources, self._fails = resources, False

    async def reset(self, task: Task) -> str:
        self._fails = "fails" in task.columns
        return str(task.prompt)

    async def step(self, turn: Turn) -> Step:
        if self._fails:
            raise RuntimeError("as planned")
        if turn.text == "done":
            return Step(is_done=True, finish="answer")
        found = await self._resources.search(turn.text)
        said = await self._resources.tool("lookup")(word=found[0])
        return Step(Observation(f"[{said}]"))


@dataclass
class OtlpReceiver:
    """What was sent: (resource's attributes, span) in the order of arrival."""

    spans: list[tuple[dict[str, Any], Any]] = field(default_factory=list)
    status: int = 200
    address: str = ""

    async def receive(self, request: Request) -> Response:
        body = ExportTraceServiceRequest.FromString(await request.body())
        if self.status == 200:
            for of_resource in body.resource_spans:
                resource = attributes_of(of_resource.resource)
                self.spans += [(resource, span) for scope in of_resource.scope_spans for span in scope.spans]
        return Response(status_code=self.status)


@contextmanager
def otlp_receiver() -> Iterator[OtlpReceiver]:
    receiver = OtlpReceiver()
    with serving(Starlette(routes=[Route("/v1/traces", receiver.receive, methods=["POST"])])) as receiver.address:
        yield receiver


def attributes_of(owner: Any) -> dict[str, Any]:
    """Return the attributes of a resource, span or event as Python's values."""
    return {each.key: _value_of(each.value) for each in owner.attributes}


def _value_of(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value_of(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)


def record_traced_run(folder: Path, num_steps: int, groups_per_step: int = 8) -> Counter[str]:
    """Write a run whose samples are all recorded; returns the number of requests that each service got."""
    folder.mkdir(parents=True)
    settings = Settings.model_validate({"run": {"name": folder.name, "max_steps": num_steps}})
    save_settings(settings, folder / "settings.yaml")
    with scripted_server() as server:
        asyncio.run(_run(server, folder, num_steps, groups_per_step))
        return Counter({name: len(server.received[name]) for name in SERVICES})


async def _run(server: ScriptedServer, folder: Path, num_steps: int, groups_per_step: int) -> None:
    ledger, record = Ledger(folder / "ledger.sqlite"), RunRecord(folder, samples_per_step=10**6)
    ledger.begin_incarnation(0)
    async with AsyncExitStack() as stack:
        player = _make_player(server, stack)
        for step in range(1, num_steps + 1):
            names = [f"e0-q{step}-{place}" for place in range(groups_per_step)]
            for place, name in enumerate(names):
                ledger.lease(name, 0, name, step * groups_per_step + place, "s0", 1)
            places = [(name, index) for name in names for index in range(GROUP)]
            played = await asyncio.gather(*(_play(player, ledger, *place) for place in places))
            await asyncio.sleep(_TRAIN_S + _PUSH_S)
            ledger.mark_trained(names, step, step - 1)
            ledger.commit()
            metrics = {"time/wait_s": 0.01, "time/train_s": _TRAIN_S, "time/push_s": _PUSH_S}
            record.write_line(record.stamp(step, step, metrics))
            record.write_samples(StepBatch(step, step - 1, (), tuple(played), [], []))
    ledger.close()


def _make_player(server: ScriptedServer, stack: AsyncExitStack) -> EpisodePlayer:
    bodies: dict[str, Any] = {"retrieve": {"result": [["found"]]}, "lookup": {"result": "said"}}
    numbers = {name: itertools.count(1) for name in SERVICES}

    def script(name: str) -> str:
        def answer(received: Received) -> Answer:
            if next(numbers[name]) % BUSY_EVERY == 0:
                return Answer("busy", 429)
            return Answer(bodies.get(name) or {"rewards": [0.5] * len(received.body["prompts"])})

        return server.script_by(name, answer)

    search = SearchTool(make_spec(), Node(None, script("retrieve"), "token", make_keys()))
    form = {"type": "object", "properties": {"word": {"type": "string"}}}
    lookup = HttpToolClient(HttpTool(name="lookup", url=HttpUrl(script("lookup")), description="-", parameters=form))
    scorer = RewardClient([RewardEndpoint(name="em", url=HttpUrl(script("score")))], "sum")
    for each in (search, lookup, scorer):
        stack.push_async_callback(each.close)
    gate = VersionGate()
    gate.open()
    engine = ScriptedEngine(lambda context: "done" if "[said]" in context else "ask")
    resources = Resources(3, {"search": search, "lookup": lookup})
    return EpisodePlayer(engine, gate, LooksUp, resources, scorer, RolloutSettings(), "s0")


async def _play(player: EpisodePlayer, ledger: Ledger, group: str, index: int) -> Trajectory:
    """Return a sample's trajectory, after a failed attempt if it is its turn."""
    sample = SampleTask(group, index, 1, 1, "train", 7, Task("Q?", "A", {}))
    if index == FAILS:
        try:
            await player.play(replace(sample, task=Task("Q?", "A", {"fails": True})))
        except NeighbourError as error:
            ledger.add_failure(group, index, 1, "s0", error.boundary, error.detail)
        sample = replace(sample, attempt=2)
    trajectory = await player.play(sample)
    ledger.add_trajectory(trajectory.facts)
    return trajectory


if __name__ == "__main__":
    print(dict(record_traced_run(Path(sys.argv[1]) / "traced", num_steps=16)))
