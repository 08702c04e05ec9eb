"""What an environment is: it gives the prompt, then answers each turn of the policy with an observation or the end.

Bundled environments and a user's own have this one interface. It is about texts only: tokens, masks and limits are kept
outside of it.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from protocol.errors import NeighbourError

Messages = list[dict[str, Any]]
Finish = Literal["answer", "stop", "length", "turns"]


@dataclass(frozen=True)
class Chat:
    """A prompt of chat messages for a model that is told of tools, both by its chat template."""

    messages: Messages  # with a role each
    tools: list[
        dict[str, Any]
    ]  # OpenAI's form: {"type": "function", "function": {"name", "description", "parameters"}}


Prompt = str | Messages | Chat


@dataclass(frozen=True)
class Task:
    """What one sample starts from."""

    prompt: str | Messages  # of the data set's row: text, or chat messages
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

    # appended before the next turn: a text as it is; chat messages by the model's template, which ends the policy's
    # turn before them and opens its next one. None: nothing is
    observation: Observation | str | Messages | None = None
    is_done: bool = False  # True: the conversation ends here; the observation is not used
    reward: float | None = None  # added to the sample's reward, as its part named environment; None: no such part
    finish: Finish | None = None  # how the conversation ended; None: as its last turn did
    score: float | None = None  # of the conversation so far, for filter.score = reward; the last one counts
    logs: Mapping[str, float] = field(
        default_factory=dict
    )  # numbers worth a curve, by name; of each the last one counts


def _no_template(messages: Messages) -> str:
    raise NeighbourError("environment", "asks for chat messages as text, and the model has no chat template")


@dataclass(frozen=True)
class Resources:
    """What every environment is made with."""

    max_turns: int  # rollout.max_turns: turns that may get an observation, before one last turn
    tools: Mapping[str, Callable[..., Awaitable[Any]]] = field(default_factory=dict)  # those that its class requires
    chat_template: Any = None  # the model's, a text, or several by name; None: it has none
    render: Callable[[Messages], str] = _no_template  # chat messages as the text that the policy would read first

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


class ToolRefusal(Exception):
    """A call that its caller, the policy, got wrong: the text is what it reads instead of a result."""


class ModelTool(Protocol):
    """A tool that the policy itself calls, by a name and JSON arguments."""

    @property
    def schema(self) -> dict[str, Any]:
        """Its name, description and parameters, as in `Chat.tools`."""

    async def answer(self, arguments: Mapping[str, Any]) -> str:
        """Return what the policy reads. Raises: ToolRefusal, or NeighbourError for a failure that is not the policy's.

        arguments: by name, those that the schema requires and no others; their types are the tool's to check.
        """


class Environment(Protocol):
    """One conversation. Made for each sample as `Class(resources)`.

    With `def snapshot(self)` and `async def resume(self, snapshot)` another server goes on with it when its own is
    gone: `snapshot` is asked after each step for all that the next ones depend on, as JSON values (None: nobody can go
    on from here), and `resume`, on a new object that was reset with the same task, is given that. Without them the
    sample begins anew.

    A class names the tools it uses: `requires = {"search"}`. It may have `async def close(self)`, which is called once
    the conversation has ended, however it did. `gives_reward = True`: without rewards.endpoints nobody else is asked.
    An exception is a failure of this environment: the sample is returned with its text, and nothing is trained.
    """

    stop: tuple[str, ...]  # strings that end a turn; they stay in its text

    async def reset(self, task: Task) -> Prompt:
        """Return what the policy reads first."""

    async def step(self, turn: Turn) -> Step:
        """Return the reply to what the policy wrote."""


MakeEnvironment = Callable[[Resources], Environment]
