"""A player with a scripted engine, rewards and retriever."""

from typing import Any

from protocol.settings.rollout import RolloutSettings
from rollout.engine.version_gate import VersionGate
from rollout.environments.base import MakeEnvironment, Resources, SingleTurn, Task
from rollout.episodes.conversation import SampleTask
from rollout.episodes.player import EpisodePlayer
from tests.fakes.engines import ScriptedEngine
from tests.fakes.rollout_fakes import ScriptedScorer

TASK = Task("Q?", "A", {})


SAMPLE = SampleTask("g", 2, 1, 1, "train", 7, TASK)


def make_player(
    engine: ScriptedEngine,
    environment: MakeEnvironment = SingleTurn,
    scorer: ScriptedScorer | None = None,
    resources: Resources | None = None,
    gate: VersionGate | None = None,
    **settings: Any,
) -> EpisodePlayer:
    if gate is None:
        gate = VersionGate()
        gate.open()
    limits = {"max_response_tokens": 32, "max_context_tokens": 256, "max_observation_tokens": 96, **settings}
    return EpisodePlayer(
        engine,
        gate,
        environment,
        resources or Resources(3),
        scorer or ScriptedScorer(),
        RolloutSettings(**limits),
        "s0",
    )


def finding(*contents: str) -> Resources:
    async def search(query: str) -> list[str]:
        return list(contents)

    return Resources(3, {"search": search})
