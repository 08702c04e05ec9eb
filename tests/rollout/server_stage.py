"""A rollout server on a stage: a scripted engine and coordinator, and services over HTTP that answer by script."""

import itertools
from typing import Any

from protocol.settings.run_spec import EngineRequest
from protocol.weights.controls import Attempt, learner_name
from rollout.neighbours.node import Node
from rollout.server import RolloutServer
from tests.fakes.engines import ScriptedEngine
from tests.fakes.http_servers import Answer, ScriptedServer
from tests.fakes.rollout_fakes import ScriptedCoordinator, make_keys, make_spec

ENGINE = EngineRequest(
    model="tiny",
    dtype="float32",
    tensor_parallel_size=1,
    seed=0,
    max_model_len=256,
    trust_remote_code=False,
    weights_backend="gloo",
    engine_args={},
).model_dump(mode="json")
KEYS = make_keys()


class Stage:
    """A server with a scripted engine, a coordinator and services that answer by script."""

    def __init__(self, services: ScriptedServer) -> None:
        self.engine = ScriptedEngine(lambda context: "<answer> 4</answer>", version=7)
        self.deaths: list[str] = []
        self.num_starts = 0
        self.services = services
        self.coordinator = ScriptedCoordinator(KEYS)
        passages = {"result": [[{"document": {"id": "1", "contents": "x"}, "score": 1.0}]]}
        self.node = Node(
            reward_url=services.script("reward", Answer({"rewards": [0.5]})),
            retriever_url=services.script("retrieve", Answer(passages)),
            token="secret-token-secret",
            keys=KEYS,
        )
        self.server = RolloutServer("sluice-rollout-0", ENGINE, self._start, lambda: self.node, self.deaths.append)

    async def _start(self, spec: EngineRequest) -> ScriptedEngine:
        assert spec.model == "tiny"
        self.num_starts += 1
        return self.engine

    def run(self, incarnation: int = 1, environment: str = "search", **changes: Any) -> dict[str, Any]:
        spec = make_spec(self.coordinator.address, incarnation, environment=environment)
        return {**spec.model_dump(mode="json"), **changes}

    async def begin(self, version: int = 1, by: Attempt | None = None) -> None:
        """Attach the run, push a version, and be greeted."""
        await self.server.attach(self.run())
        await push(self.server, version, by)
        await self.coordinator.welcome()


_numbers = itertools.count(1)


def attempt(run: str = "run", incarnation: int = 1) -> Attempt:
    """Return one that is newer than all before, of the learner of a stage's run."""
    return learner_name(run, incarnation), next(_numbers)


async def sleep_and_push(server: RolloutServer, version: int) -> Attempt:
    """Have the server sleep and take a version; returns the push's attempt, by which it is to be served."""
    await server.sleep(attempt())
    by = attempt()
    await server.prepare(by, {})
    await server.receive(by)
    await server.commit(by, version, "digest")
    return by


async def push(server: RolloutServer, version: int, by: Attempt | None = None) -> None:
    by = by or attempt()
    await server.prepare(by, {})
    await server.receive(by)
    await server.commit(by, version, "digest")
    await server.serve(by, version)
