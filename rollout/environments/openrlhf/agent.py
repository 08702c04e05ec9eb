"""One conversation of an agent file, whichever of OpenRLHF's four generations it was written for.

1  async step(state, action, label)                       -> (reward, next state, done, info)
2  async step(observation, action, label, **kwargs)       -> {rewards, scores, next_observation, done, extra_logs}
3  class AgentInstance with `async def __init__`          \\  reset({observation, label}) -> {observation}
4  class AgentInstance with `def __init__`                /  step({observation_text, action_text, label, ..})
                                                 -> {rewards, scores, environment_feedback, done, extra_logs}
"""

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from protocol.errors import NeighbourError

_ENVIRONMENT = "environment"


@dataclass(frozen=True)
class Replied:
    """What an agent says to a turn."""

    feedback: str  # what the policy reads next
    is_done: bool  # True: the conversation ends
    reward: Any  # for this turn; a number, or a tensor of one
    score: Any = None  # the conversation's so far, 0 to 1, for filtering; None: it gives none
    logs: Mapping[str, Any] = field(default_factory=dict)  # numbers worth a curve, by name


class Agent(Protocol):
    """One conversation's. What it raises is the failure of its sample."""

    async def reset(self, observation: str, label: Any) -> str:
        """Return what the policy reads first."""

    async def step(self, observation: str, action: str, label: Any) -> Replied:
        """Return the reply to a turn. observation: all that was said before it, prompt included."""


class FunctionAgent:
    """Generations 1 and 2: a function, with what its module keeps between calls."""

    def __init__(self, step: Callable[..., Awaitable[Any]]) -> None:
        """step: of a module that no other conversation uses."""
        self._step = step
        parameters = inspect.signature(step).parameters.values()
        takes_more = any(each.kind is each.VAR_KEYWORD or each.name == "sampling_params" for each in parameters)
        self._options = {"sampling_params": None} if takes_more else {}

    async def reset(self, observation: str, label: Any) -> str:
        return observation

    async def step(self, observation: str, action: str, label: Any) -> Replied:
        returned = await self._step(observation, action, label, **self._options)
        if isinstance(returned, Mapping):
            following = returned.get("next_observation", returned.get("next_state"))
            return _replied(returned, _feedback(following, observation + action))
        if not isinstance(returned, tuple | list) or len(returned) < 3:
            raise _wrong("step", returned, "a dict, or (reward, next state, done, info)")
        reward, following, done, *_ = returned
        return Replied(_feedback(following, observation + action), bool(done), reward)


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

    async def step(self, observation: str, action: str, label: Any) -> Replied:
        states = {"observation_text": observation, "action_text": action, "label": label, "sampling_params": None}
        returned = await self._instance.step(states)
        if not isinstance(returned, Mapping) or not isinstance(returned.get("environment_feedback"), str):
            raise _wrong("step", returned, 'a dict with a text as "environment_feedback"')
        return _replied(returned, returned["environment_feedback"])


def _replied(returned: Mapping[str, Any], feedback: str) -> Replied:
    for name in ("rewards", "done"):
        if name not in returned:
            raise _wrong("step", dict(returned), f"a dict with {name!r}")
    if returned.get("sampling_params") is not None:
        problem = "step returned sampling_params, which it was not given"
        raise NeighbourError(_ENVIRONMENT, f"{problem}: samples are drawn as rollout.temperature and sampling.* say")
    logs = returned.get("extra_logs") or {}
    return Replied(feedback, bool(returned["done"]), returned["rewards"], returned.get("scores"), logs)


def _feedback(following: Any, before: str) -> str:
    """Return what the agent added to the conversation. It cannot change it: what was sampled is what is trained."""
    if not isinstance(following, str):
        raise _wrong("step", following, "the whole conversation as text")
    if not following.startswith(before):
        problem = "the next observation that step returned does not begin with observation + action"
        raise NeighbourError(_ENVIRONMENT, f"{problem}: what the policy has read and written cannot be changed")
    return following[len(before) :]


def _wrong(what: str, value: Any, expected: str) -> NeighbourError:
    return NeighbourError(_ENVIRONMENT, f"{what} returned {type(value).__name__} {value!r:.80}, expected {expected}")
