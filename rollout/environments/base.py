"""What an environment is: it gives the prompt, then answers each turn of the policy with an observation or the end.

Bundled environments and a user's own have this one interface. It is about texts only: tokens, masks and limits are kept
outside of it.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from protocol.errors import NeighbourError

Prompt = str | list[dict[str, Any]]
Finish = Literal["answer", "stop", "length", "turns"]


@dataclass(frozen=True)
class Task:
    """What one sample starts from."""

    prompt: Prompt  # of the data set's row: text, or chat messages
    label: Any  # of the row: any JSON value; None: the row has none
    columns: Mapping[str, Any]  # the row's other columns, by name
    is_greedy: bool = False  # True: an evaluation's sample that the policy writes without randomness


@dataclass(frozen=True)
class Turn:
    """What the policy wrote before it stopped or was stopped."""

    text: str  # special tokens kept, a stop string too
    finish: Literal["stop", "length"]  # stop: end of text or a stop string. length: cut by a token limit
    stop_string: str | None = None  # the one that ended it; None: something else did


@dataclass(frozen=True)
class Observation:
    """A reply to the policy. Over rollout.max_observation_tokens the end of its body is cut; head and tail stay."""

    body: str  # anyone's text: the name of a control token in it stays a name
    head: str = ""  # the environment's own words before it: they may speak in control tokens
    tail: str = ""  # the same, after it

    @property
    def text(self) -> str:
        """All of it, uncut."""
        return self.head + self.body + self.tail


@dataclass(frozen=True)
class Step:
    """An environment's answer to a turn."""

    observation: Observation | str | None = None  # appended before the next turn; None: nothing is
    is_done: bool = False  # True: the conversation ends here; the observation is not used
    reward: float | None = None  # added to the sample's reward, as its part named environment; None: no such part
    finish: Finish | None = None  # how the conversation ended; None: as its last turn did


@dataclass(frozen=True)
class Resources:
    """What every environment is made with."""

    max_turns: int  # rollout.max_turns: turns that may get an observation, before one last turn
    tools: Mapping[str, Callable[..., Awaitable[Any]]] = field(default_factory=dict)  # those that its class requires

    def tool(self, name: str) -> Callable[..., Awaitable[Any]]:
        """Return a tool to call. A call that fails raises NeighbourError: let it pass, the sample is made again.

        Raises: NeighbourError("environment") for one that the class does not require.
        """
        if name not in self.tools:
            raise NeighbourError("environment", f"uses the tool {name!r}: its class has to say requires = {{{name!r}}}")
        return self.tools[name]

    async def search(self, query: str) -> list[str]:
        """Return the contents of the passages found, best first, by the tool "search"."""
        return list(await self.tool("search")(query))


class Environment(Protocol):
    """One conversation. Made for each sample as `Class(resources)`.

    A class names the tools it uses: `requires = {"search"}`.
    An exception is a failure of this environment: the sample is returned with its text, and nothing is trained.
    """

    stop: tuple[str, ...]  # strings that end a turn; they stay in its text

    async def reset(self, task: Task) -> Prompt:
        """Return what the policy reads first."""

    async def step(self, turn: Turn) -> Step:
        """Return the reply to what the policy wrote."""


MakeEnvironment = Callable[[Resources], Environment]
