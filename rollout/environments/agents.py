"""Samples that agents play: programs that know a base URL and a key, and speak OpenAI's API.

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
    """What a program is called with, for one sample."""

    base_url: str  # of an OpenAI client; ends in /v1
    api_key: str  # this sample's: what is generated with it is this sample's
    prompt: str | Messages  # of the data set's row: text, or chat messages
    label: Any  # of the row: any JSON value; None: the row has none
    columns: Mapping[str, Any]  # the row's other columns, by name
    is_greedy: bool  # True: an evaluation's sample that the policy writes without randomness


AgentProgram = Callable[[AgentTask], Any]
"""Returns the reward, or None where it reported one itself or `rewards` scores; async, or else run in a thread."""


@dataclass(frozen=True)
class PlayedByAgents:
    """Stands where an environment's class does, in runs that have no environment."""

    program: AgentProgram | None  # called for each sample; None: programs outside ask for samples
    stop: tuple[str, ...] = ()
    gives_reward: bool = True

    def __call__(self, resources: Resources) -> Environment:
        raise NotImplementedError("samples of agents are played by rollout.endpoint")
