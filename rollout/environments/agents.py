"""Samples that agents play: programs with a base URL and a key that use OpenAI's API.

async def solve(task: AgentTask) -> float | None:
    client = AsyncOpenAI(base_url=task.base_url, api_key=task.api_key)
    ...
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rollout.environments.base import Environment, Messages, Resources


@dataclass(frozen=True)
class AgentTask:
    """Argument of an agent program, for one sample."""

    base_url: str  # base URL for an OpenAI client; ends in /v1
    api_key: str  # key of this sample: requests with it belong to the sample
    prompt: str | Messages
    label: Any  # the row's label, any JSON value; None: the row has none
    columns: Mapping[str, Any]
    is_greedy: bool  # greedy sample of an evaluation


AgentProgram = Callable[[AgentTask], Any]
"""Returns the reward; None: it reported one, or rewards.endpoints score. Plain functions run in a thread."""


@dataclass(frozen=True)
class PlayedByAgents:
    """Takes the place of an environment's class in runs without an environment."""

    program: AgentProgram | None  # program called for each sample; None: external programs ask for samples
    stop: tuple[str, ...] = ()
    gives_reward: bool = True

    def __call__(self, resources: Resources) -> Environment:
        raise NotImplementedError("samples of agents are played by rollout.endpoint")
