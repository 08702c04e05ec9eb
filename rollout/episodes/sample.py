"""What an episode starts from, and the engine and reward services as an episode needs them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from protocol.wire.trajectory import Trajectory
from rollout.engine.generation import EngineStats, Generation, Sampling
from rollout.environments.base import Task
from rollout.episodes.transcript import Transcript
from rollout.neighbours.reward_client import Score, ScoreRequest

AGENT = "agent"
"""Boundary of what a user's agent program does."""


@dataclass(frozen=True)
class Interrupted:
    """A conversation that another server had begun."""

    transcript: Transcript  # up to the reply to its last finished turn
    snapshot: str  # its environment's then: JSON


@dataclass(frozen=True)
class SampleTask:
    """One trajectory to make: its place in its lease, and what it starts from."""

    group: str  # name of its group, as in the lease
    sample_index: int  # counted from 0 within the group
    attempt: int  # of the lease that asked for it
    incarnation: int  # start of the run that leased it
    kind: Literal["train", "eval"]  # eval: held-out, scored and never trained
    seed: int  # the run's
    task: Task  # what its environment starts from
    temperature: float | None = None  # of a sample that is not greedy; None: rollout.temperature
    before: Interrupted | None = None  # what there is of it already; None: nothing

    @property
    def key(self) -> str:
        """Names this try at this sample, in requests to engine and reward services."""
        return f"{self.group}/{self.sample_index}/{self.attempt}"


class TurnKeeper(Protocol):
    """Has one sample's finished turns kept elsewhere, so that another server can go on from them."""

    def keep(self, transcript: Transcript, snapshot: str) -> None:
        """Take the conversation as it is, with the reply to its last turn. snapshot: its environment's, JSON."""

    async def until_kept(self) -> None:
        """Return once what was taken last is kept, or nobody seems to be there to keep it."""


@dataclass
class WrittenSoFar:
    """What the policy has written of a sample so far: known to its player's caller also when it is never finished."""

    num_model_tokens: int = 0  # of turns that the engine ended, usable or not
    keeper: TurnKeeper | None = None  # told of each turn that was answered; None: nobody keeps them


class Generator(Protocol):
    """The engine as a player needs it."""

    policy_version: int | None

    @property
    def is_alive(self) -> bool:
        """False as soon as it is known to be gone; it never comes back."""
        ...

    @property
    def stats(self) -> EngineStats: ...

    @property
    def tokenizer(self) -> Any: ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    async def generate(self, prompt_tokens: Sequence[int], sampling: Sampling, request_id: str) -> Generation: ...


class Scorer(Protocol):
    """The reward services as a player needs them."""

    @property
    def is_accepting(self) -> bool: ...

    async def score(self, request: ScoreRequest) -> Score: ...


class Player(Protocol):
    """Makes samples of one run, each from its prompt to its trajectory."""

    num_cut_observations: int  # observations that lost their end so far

    async def play(self, sample: SampleTask, written: WrittenSoFar | None = None) -> Trajectory:
        """Return the finished trajectory. written: counts up with each turn that the engine ends.

        Raises: NeighbourError naming who failed.
        """
