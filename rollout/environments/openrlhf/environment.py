"""Plays an agent file's conversation: its texts in, its rewards, scores and logs out."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rollout.environments.base import Observation, Prompt, Resources, Step, Task, Turn
from rollout.environments.openrlhf.agent import Agent


class AgentPlay:
    """One conversation. It ends when the agent says so, or when the context is full; rollout.max_turns is not asked."""

    stop: tuple[str, ...] = ()

    def __init__(self, resources: Resources, agent: Agent) -> None:
        self._resources = resources
        self._agent = agent
        self._said = ""
        self._label: Any = None

    async def reset(self, task: Task) -> Prompt:
        """Return what the agent's reset makes of the row's prompt; of chat messages it gets the rendered text."""
        self._label = task.label
        prompt = task.prompt
        text = prompt if isinstance(prompt, str) else self._resources.render(prompt)
        self._said = await self._agent.reset(text, task.label)
        # Untouched messages go on as such: what a row holds in them is no more than text.
        return prompt if self._said == text else self._said

    async def step(self, turn: Turn) -> Step:
        """Return the agent's feedback, which may speak in control tokens: it writes the turns' ends and beginnings."""
        replied = await self._agent.step(self._said, turn.text, self._label)
        self._said += turn.text + replied.feedback
        return Step(
            Observation("", head=replied.feedback),
            is_done=replied.is_done,
            reward=replied.reward,
            score=replied.score,
            logs=replied.logs,
        )


@dataclass(frozen=True)
class MakeAgentPlay:
    """Stands where an environment's class does."""

    make_agent: Callable[[], Agent]  # for each conversation
    stop: tuple[str, ...] = ()
    gives_reward: bool = True

    def __call__(self, resources: Resources) -> AgentPlay:
        return AgentPlay(resources, self.make_agent())
