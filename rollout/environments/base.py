"""What an environment is: it gives the prompt, then answers each turn of the policy with an observation or the end.

`rollout.episodes.player` plays environments; bundled ones and a user's own have this one interface. Texts only:
tokens, masks and limits are the player's matter.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from protocol.errors import NeighbourError

Prompt = str | list[dict[str, Any]]
Finish = Literal["answer", "stop", "length", "turns"]
Search = Callable[[str], Awaitable[list[str]]]


@dataclass(frozen=True)
class Task:
    """One sample to make. prompt: text or chat messages. columns: the prompt's other data set columns."""

    prompt: Prompt
    label: Any
    columns: Mapping[str, Any]
    is_greedy: bool = False


@dataclass(frozen=True)
class Turn:
    """What the policy wrote, special tokens kept.

    finish: "stop" (end of text, or the stop string that is named) or "length" (cut by a token limit).
    """

    text: str
    finish: Literal["stop", "length"]
    stop_string: str | None = None


@dataclass(frozen=True)
class Observation:
    """A reply to the policy. Over rollout.max_observation_tokens the end of its body is cut; head and tail stay."""

    body: str
    head: str = ""
    tail: str = ""

    @property
    def text(self) -> str:
        return self.head + self.body + self.tail


@dataclass(frozen=True)
class Step:
    """An environment's answer to a turn.

    observation: appended before the next turn; None adds nothing. reward: added to the sample's reward under the part
    "environment". finish: how the conversation ended; None with is_done: as the turn ended.
    """

    observation: Observation | str | None = None
    is_done: bool = False
    reward: float | None = None
    finish: Finish | None = None


async def _no_search(query: str) -> list[str]:
    raise NeighbourError("retriever", f"asked for {query!r}, but this environment does not say uses_retriever = True")


@dataclass(frozen=True)
class Resources:
    """What every environment is made with. search(query): contents of the passages found, best first.

    A search that fails raises NeighbourError: let it pass, the sample is then made again elsewhere.
    """

    max_turns: int
    search: Search = _no_search


class Environment(Protocol):
    """One conversation. Made for each sample as `Class(resources)`.

    stop: strings that end a turn; they stay in its text. A class that searches says `uses_retriever = True`.
    An exception is a failure of this environment: the sample is returned with its text, and nothing is trained.
    """

    stop: tuple[str, ...]

    async def reset(self, task: Task) -> Prompt:
        """Return what the policy reads first."""

    async def step(self, turn: Turn) -> Step:
        """Return the reply to what the policy wrote."""


MakeEnvironment = Callable[[Resources], Environment]
