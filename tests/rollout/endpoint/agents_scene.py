"""A run whose samples agents play: a real session and endpoint between a scripted coordinator and a scripted engine."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from openai import AsyncOpenAI

from protocol.settings.rollout import AgentsSettings
from protocol.wire import messages as m
from protocol.wire.trajectory import Trajectory
from rollout.endpoint.player import AgentPlayer
from rollout.engine.generation import Generation, Sampling
from rollout.engine.version_gate import VersionGate
from rollout.environments.agents import AgentProgram
from rollout.neighbours.reward_client import NoRewards
from rollout.session.session import RolloutSession
from tests.fakes.engines import TokenizingEngine
from tests.fakes.playing_session import session_at_work
from tests.fakes.rollout_fakes import ScriptedCoordinator, ScriptedScorer, make_keys, make_spec
from tests.fakes.tool_models import FAMILIES

TOKEN = "the-clusters-own-token"
MESSAGES: Any = [{"role": "user", "content": "2+2"}]


class WatchedEngine(TokenizingEngine):
    """Keeps what it wrote, each with the tokens before it; waits while `may_write` is not set.

    num_given_up: requests that were cancelled while it waited.
    """

    def __init__(self, write: Callable[[str], str], family: str = "hermes") -> None:
        super().__init__(write, FAMILIES[family].tokenizer())
        self.wrote: list[tuple[list[int], list[int]]] = []
        self.asked: list[Sampling] = []
        self.num_given_up = 0
        self.may_write = asyncio.Event()
        self.may_write.set()

    async def generate(self, prompt_tokens: Any, sampling: Sampling, request_id: str) -> Generation:
        self.asked.append(sampling)
        before = list(prompt_tokens)
        try:
            await self.may_write.wait()
        except asyncio.CancelledError:
            self.num_given_up += 1
            raise
        generation = await super().generate(prompt_tokens, sampling, request_id)
        self.wrote.append((before, generation.tokens))
        return generation


@dataclass
class AgentsScene:
    """What a test of agents needs."""

    coordinator: ScriptedCoordinator
    engine: WatchedEngine
    player: AgentPlayer
    session: RolloutSession
    http: httpx.AsyncClient  # with the cluster's token
    outcomes: dict[tuple[str, int], m.SampleFailed | Trajectory] = field(default_factory=dict)

    async def take(self, **headers: str) -> dict[str, Any]:
        """Ask for a sample as a program outside does; returns what it is told."""
        reply = await self.http.post("/sluice/sessions", json={"wait_s": 20.0}, headers=headers)
        assert reply.status_code == 200, reply.text
        return dict(reply.json())

    def client(self, told: dict[str, Any], **options: Any) -> AsyncOpenAI:
        """Return OpenAI's own client for a sample."""
        return AsyncOpenAI(base_url=told["base_url"], api_key=told["api_key"], **options)

    async def ask(self, told: dict[str, Any], body: Any = None, **headers: str) -> httpx.Response:
        """Send a request for a chat completion. body: None: one with `MESSAGES`."""
        key = {"Authorization": f"Bearer {told['api_key']}", **headers}
        body = body or {"model": "m", "messages": MESSAGES}
        return await self.http.post("/v1/chat/completions", json=body, headers=key)

    async def end(self, told: dict[str, Any], verb: str = "finish", **body: Any) -> httpx.Response:
        """Report a sample's end."""
        key = {"Authorization": f"Bearer {told['api_key']}"}
        return await self.http.post(f"/sluice/sessions/{told['id']}/{verb}", json=body, headers=key)

    async def outcome(self, group: str, index: int = 0) -> m.SampleFailed | Trajectory:
        """Return what became of a sample."""
        async with asyncio.timeout(30.0):
            while (group, index) not in self.outcomes:
                message = await self.coordinator.next(m.Message, timeout_s=30.0)
                if isinstance(message, m.SampleFailed):
                    self.outcomes[message.group, message.sample_index] = message
                elif isinstance(message, m.TrajectoryDone):
                    facts = message.facts
                    made = Trajectory.from_buffers(facts, self.coordinator.buffers[-1])
                    self.outcomes[facts.group, facts.sample_index] = made
        return self.outcomes[group, index]

    async def trajectory(self, group: str, index: int = 0) -> Trajectory:
        """Return a sample's trajectory."""
        made = await self.outcome(group, index)
        assert isinstance(made, Trajectory), made
        return made

    async def rewarded(self, told: dict[str, Any]) -> Trajectory:
        """Report the end of the first sample of g with the reward 1; return its trajectory."""
        await self.end(told, "reward", reward=1.0)
        return await self.trajectory("g")

    async def failure(self, group: str, index: int = 0) -> str:
        """Return why a sample failed."""
        made = await self.outcome(group, index)
        assert isinstance(made, m.SampleFailed), made
        return f"{made.boundary}: {made.detail}"


async def _ping(coordinator: ScriptedCoordinator) -> None:
    """Be heard, as a coordinator is each second: a session sends nothing to one that is silent."""
    while True:
        coordinator.send(m.Ping(**coordinator.stamp, newest_lease=1))
        await asyncio.sleep(0.5)


@asynccontextmanager
async def agents_scene(
    write: Callable[[str], str] = lambda context: "four<|im_end|>",
    program: AgentProgram | None = None,
    scorer: ScriptedScorer | None = None,
    family: str = "hermes",
    agents: dict[str, Any] | None = None,
    **rollout: Any,
) -> AsyncIterator[AgentsScene]:
    """Yield a run that was welcomed. scorer: None: rewards.endpoints is empty."""
    coordinator_keys = make_keys()
    coordinator = ScriptedCoordinator(coordinator_keys)
    limits = {"max_response_tokens": 256, "max_context_tokens": 4096, "environment": "agents", **rollout}
    spec = make_spec(coordinator.address, **limits).model_copy(update={"agents": AgentsSettings(**(agents or {}))})
    engine, gate = WatchedEngine(write, family), VersionGate()
    gate.open()
    rewards: Any = scorer or NoRewards()
    player = await AgentPlayer.open(engine, gate, program, rewards, spec, "s0", TOKEN)
    address = player.base_url.removesuffix("/v1")
    headers = {"Authorization": f"Bearer {TOKEN}"}
    try:
        async with (
            session_at_work(coordinator, coordinator_keys, spec, player, engine, player) as playing,
            httpx.AsyncClient(base_url=address, headers=headers, timeout=60.0, trust_env=False) as http,
        ):
            await coordinator.welcome()
            pinging = asyncio.create_task(_ping(coordinator))
            try:
                yield AgentsScene(coordinator, engine, player, playing.session, http)
            finally:
                pinging.cancel()
    finally:
        await player.close()


@asynccontextmanager
async def taken(*args: Any, **options: Any) -> AsyncIterator[tuple[AgentsScene, dict[str, Any], AsyncOpenAI]]:
    """Yield a scene, as `agents_scene`, with one sample of the group "g" that an agent has taken, and its client."""
    async with agents_scene(*args, **options) as scene:
        scene.coordinator.lease("g")
        told = await scene.take()
        async with scene.client(told) as client:
            yield scene, told, client
