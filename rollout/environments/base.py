"""An environment gives the prompt, then answers each turn of the policy, up to the end.

It carries texts. The player adds tokens, masks and limits.
"""

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from protocol.errors import NeighbourError

Messages = list[dict[str, Any]]
Finish = Literal["answer", "stop", "length", "turns"]


@dataclass(frozen=True)
class Chat:
    """A prompt of chat messages with tools, both rendered by the model's chat template."""

    messages: Messages
    # tools in OpenAI's form: {"type": "function", "function": {"name", "description", "parameters"}}
    tools: list[dict[str, Any]]


class RenderedText(str):
    """A prompt that is the whole text of the conversation so far: the tokenizer adds no first token."""


Prompt = str | Messages | Chat


@dataclass(frozen=True)
class Task:
    """Start of one sample."""

    prompt: str | Messages
    label: Any  # the row's label, any JSON value; None: none
    columns: Mapping[str, Any]
    is_greedy: bool = False  # greedy sample of an evaluation


@dataclass(frozen=True)
class Turn:
    """One message of the policy."""

    text: str  # text with special tokens and stop string
    finish: Literal["stop", "length"]  # "stop": end of text or a stop string; "length": a token limit
    stop_string: str | None = None
    content: str = ""  # text without special tokens, as reward functions read it: compare this one with an answer


@dataclass(frozen=True)
class Observation:
    """A reply to the policy. Over rollout.max_observation_tokens the end of its body is cut; head and tail stay."""

    body: str  # untrusted text: control tokens in it stay text
    head: str = ""  # trusted text before the body: may contain control tokens
    tail: str = ""  # trusted text after the body

    @property
    def text(self) -> str:
        """The whole observation, uncut."""
        return self.head + self.body + self.tail


@dataclass(frozen=True)
class Step:
    """An environment's answer to a turn."""

    # text before the next turn, or chat messages for the model's template, which ends the policy's turn and opens the
    # next one; None: no text
    observation: Observation | str | Messages | None = None
    is_done: bool = False  # the conversation ends; the observation is not used
    reward: float | None = None  # amount added to the sample's reward as the part "environment"
    finish: Finish | None = None  # reason of the end; None: the last turn's
    score: float | None = None  # score for filter.score = reward; the last one counts
    # numbers for curves, by name; the last value counts
    logs: Mapping[str, float] = field(default_factory=dict)


def _no_template(messages: Messages) -> str:
    raise NeighbourError("environment", "asks for chat messages as text, and the model has no chat template")


@dataclass(frozen=True)
class Resources:
    """Resources of an environment."""

    max_turns: int  # rollout.max_turns: turns that may get an observation before one last turn
    tools: Mapping[str, Callable[..., Awaitable[Any]]] = field(default_factory=dict)  # tools that the class requires
    tokenizer: Any = None  # the model's Hugging Face tokenizer; None: unknown
    render: Callable[[Messages], str] = _no_template  # text of a chat prompt
    search_words: Literal["plain", "search_r1"] = "plain"  # retriever.words
    end_tokens: Collection[int] = ()  # tokens that end a turn, which the tokenizer may take for text

    def tool(self, name: str) -> Callable[..., Awaitable[Any]]:
        """Return a tool to call. A failed call raises NeighbourError; do not catch it: the sample is retried.

        Raises: NeighbourError("environment") for a tool that the class does not require.
        """
        if name not in self.tools:
            raise NeighbourError("environment", f"uses the tool {name!r}: its class has to say requires = {{{name!r}}}")
        return self.tools[name]

    async def search(self, query: str) -> list[str]:
        """Return the passages found by the tool "search", best first."""
        return list(await self.tool("search")(query))


class ToolRefusal(Exception):
    """A wrong call of the policy, which reads this text instead of a result."""


class ModelTool(Protocol):
    """A tool that the policy calls with JSON arguments."""

    schema: dict[str, Any]  # name, description and parameters, as in `Chat.tools`

    async def answer(self, arguments: Mapping[str, Any]) -> str:
        """Return the text that the policy reads. Raises: ToolRefusal, or NeighbourError when the tool failed.

        arguments: names and types are checked at the first level. The tool checks the rest.
        """


class Environment(Protocol):
    """One conversation. Made for each sample as `Class(resources)`.

    `requires = {"search"}` names its tools. The optional `async def close(self)` is called at the end.
    `gives_reward = True`: rewards.endpoints may be empty. An exception fails the sample with its text.

    With the optional `def snapshot(self)` and `async def resume(self, snapshot)` another server can resume the
    conversation after a crash. After each step `snapshot` returns the state as JSON values, or None: not resumable.
    `resume` gets it in a new object after `reset`.
    """

    stop: tuple[str, ...]  # strings that end a turn; they stay in the turn's text

    async def reset(self, task: Task) -> Prompt:
        """Return the prompt."""

    async def step(self, turn: Turn) -> Step:
        """Return the reply to a turn."""


MakeEnvironment = Callable[[Resources], Environment]


class SingleTurn:
    """A prompt and one answer, which the reward services score."""

    stop: tuple[str, ...] = ()

    def __init__(self, resources: Resources) -> None:
        pass

    async def reset(self, task: Task) -> Prompt:
        return task.prompt

    async def step(self, turn: Turn) -> Step:
        return Step(is_done=True)
