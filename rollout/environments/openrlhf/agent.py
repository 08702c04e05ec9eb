"""One conversation of an OpenRLHF agent file, in any of OpenRLHF's four interface generations.

1  async step(state, action, label)                       -> (reward, next state, done, info)
2  async step(observation, action, label, **kwargs)       -> {rewards, scores, next_observation, done, extra_logs}
3  class AgentInstance with `async def __init__`          \\  reset({observation, label}) -> {observation}
4  class AgentInstance with `def __init__`                /  step({observation_text, action_text, label, ..})
                                                 -> {rewards, scores, environment_feedback, done, extra_logs}
"""

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from protocol.errors import NeighbourError
from rollout.environments.base import Observation, Prompt, RenderedText, Resources, Step, Task, Turn

_ENVIRONMENT = "environment"


class Agent(Protocol):
    """The agent of one conversation. Its exceptions fail the sample."""

    async def reset(self, observation: str, label: Any) -> str:
        """Return the prompt."""

    async def step(self, observation: str, action: str, label: Any) -> tuple[str, Step]:
        """Return the text that the policy reads next, and the step without it.

        observation: the whole conversation before the turn, with the prompt.
        """


class FunctionAgent:
    """Generations 1 and 2: a function, and its module's state."""

    def __init__(self, step: Callable[..., Awaitable[Any]]) -> None:
        """step: of a module that no other conversation uses."""
        self._step = step
        parameters = inspect.signature(step).parameters.values()
        takes_more = any(each.kind is each.VAR_KEYWORD or each.name == "sampling_params" for each in parameters)
        self._options = {"sampling_params": None} if takes_more else {}

    async def reset(self, observation: str, label: Any) -> str:
        return observation

    async def step(self, observation: str, action: str, label: Any) -> tuple[str, Step]:
        returned = await self._step(observation, action, label, **self._options)
        if isinstance(returned, Mapping):
            following = returned.get("next_observation", returned.get("next_state"))
            return _feedback(following, observation + action), _step_of(returned)
        if not isinstance(returned, tuple | list) or len(returned) < 3:
            raise _wrong("step", returned, "a dict, or (reward, next state, done, info)")
        reward, following, done, *_ = returned
        return _feedback(following, observation + action), Step(is_done=done, reward=reward)


class InstanceAgent:
    """Generations 3 and 4: an object per conversation."""

    def __init__(self, make: type[Any]) -> None:
        self._make = make
        self._instance: Any = None

    async def reset(self, observation: str, label: Any) -> str:
        self._instance = object.__new__(self._make)
        # In generation 3 this is an `async def`.
        begun = self._instance.__init__()
        if inspect.isawaitable(begun):
            await begun
        states = {"observation": observation, "prompt": observation, "label": label}
        returned = await self._instance.reset(states)
        if not isinstance(returned, Mapping) or not isinstance(returned.get("observation"), str):
            raise _wrong("reset", returned, 'a dict with a text as "observation"')
        return str(returned["observation"])

    async def step(self, observation: str, action: str, label: Any) -> tuple[str, Step]:
        states = {"observation_text": observation, "action_text": action, "label": label, "sampling_params": None}
        returned = await self._instance.step(states)
        if not isinstance(returned, Mapping) or not isinstance(returned.get("environment_feedback"), str):
            raise _wrong("step", returned, 'a dict with a text as "environment_feedback"')
        return returned["environment_feedback"], _step_of(returned)


class AgentPlay:
    """Environment of an agent. It ends by the agent or by a full context; rollout.max_turns does not apply."""

    stop: tuple[str, ...] = ()

    def __init__(self, resources: Resources, agent: Agent) -> None:
        self._resources = resources
        self._agent = agent
        self._conversation = ""
        self._label: Any = None

    async def reset(self, task: Task) -> Prompt:
        """Return the prompt from the agent's reset. Of chat messages the agent gets the rendered text.

        As in OpenRLHF, a text is encoded without further special tokens: a rendered text has its first token already.
        """
        self._label = task.label
        prompt = task.prompt
        text = prompt if isinstance(prompt, str) else self._resources.render(prompt)
        self._conversation = await self._agent.reset(text, task.label)
        # Unchanged messages stay messages: their contents are untrusted text.
        is_unchanged = self._conversation == text and not isinstance(prompt, str)
        return prompt if is_unchanged else RenderedText(self._conversation)

    async def step(self, turn: Turn) -> Step:
        """Return the agent's feedback as trusted text: the agent writes the turns' ends and beginnings itself."""
        feedback, step = await self._agent.step(self._conversation, turn.text, self._label)
        self._conversation += turn.text + feedback
        return replace(step, observation=Observation("", head=feedback))


@dataclass(frozen=True)
class MakeAgentPlay:
    """Makes the environment for each sample of a run, in the place of an environment's class."""

    make_agent: Callable[[], Agent]  # one for each conversation
    stop: tuple[str, ...] = ()
    gives_reward: bool = True

    def __call__(self, resources: Resources) -> AgentPlay:
        return AgentPlay(resources, self.make_agent())


def _step_of(returned: Mapping[str, Any]) -> Step:
    """Return the step of a returned dict, without its text."""
    for name in ("rewards", "done"):
        if name not in returned:
            raise _wrong("step", dict(returned), f"a dict with {name!r}")
    if returned.get("sampling_params") is not None:
        problem = "step returned sampling_params, which it was not given"
        raise NeighbourError(_ENVIRONMENT, f"{problem}: rollout.temperature and sampling.* decide the sampling")
    if returned.get("environment_images"):
        raise NeighbourError(_ENVIRONMENT, "step returned environment_images, and the policy reads text only")
    logs = returned.get("extra_logs") or {}
    return Step(is_done=returned["done"], reward=returned["rewards"], score=returned.get("scores"), logs=logs)


def _feedback(following: Any, before: str) -> str:
    """Return the text that the agent appended. It cannot change earlier text: the sampled tokens are trained."""
    if not isinstance(following, str):
        raise _wrong("step", following, "the whole conversation as text")
    if not following.startswith(before):
        problem = "the next observation that step returned does not begin with observation + action"
        raise NeighbourError(_ENVIRONMENT, f"{problem}: earlier text of a conversation cannot be changed")
    return following[len(before) :]


def _wrong(method: str, value: Any, expected: str) -> NeighbourError:
    return NeighbourError(_ENVIRONMENT, f"{method} returned {type(value).__name__} {value!r:.80}, expected {expected}")
