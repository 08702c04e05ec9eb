"""A sample to make, and the interfaces of engine, reward services and listeners that its player needs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from protocol.wire.trajectory import Trajectory
from rollout.engine.generation import EngineStats, Generation, Sampling
from rollout.environments.base import Task
from rollout.environments.guard import GuardedEnvironment
from rollout.episodes.transcript import Transcript
from rollout.neighbours.reward_client import Score
from rollout.neighbours.reward_endpoint import ScoreRequest

AGENT = "agent"
"""Boundary of failures of a user's agent program."""


@dataclass(frozen=True)
class SampleTask:
    """One trajectory to make: its place in its lease, and its start."""

    group: str
    sample_index: int  # index within the group, from 0
    attempt: int  # attempt of its lease
    incarnation: int  # run's start that leased it
    kind: Literal["train", "eval"]  # "eval": held-out, scored and never trained
    seed: int
    task: Task  # start of its environment
    temperature: float | None = None  # temperature of a sample that is not greedy; None: rollout.temperature

    @property
    def key(self) -> str:
        """Name of this attempt at this sample, in requests to engine and reward services."""
        return f"{self.group}/{self.sample_index}/{self.attempt}"


class TurnListener(Protocol):
    """Follows one sample's turns. Its errors fail the sample."""

    async def take_up(self, environment: GuardedEnvironment) -> Transcript | None:
        """Return the transcript to continue, after the environment resumed there; None: the sample begins."""

    async def before_step(self) -> None:
        """Called after each turn, before the environment gets it."""

    def on_turn_finished(self, transcript: Transcript, environment: GuardedEnvironment) -> None:
        """Called with each turn's reply in the transcript."""


@dataclass
class WrittenSoFar:
    """Progress of a sample, which its player's caller reads even if the sample fails."""

    num_model_tokens: int = 0  # tokens of turns that the engine ended, usable or not
    listener: TurnListener | None = None  # attachment that follows the turns; None: no attachment


class Generator(Protocol):
    """The engine."""

    policy_version: int | None

    @property
    def is_alive(self) -> bool:
        """False once it has crashed; it never comes back."""
        ...

    @property
    def stats(self) -> EngineStats: ...

    @property
    def tokenizer(self) -> Any: ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    async def generate(self, prompt_tokens: Sequence[int], sampling: Sampling, request_id: str) -> Generation: ...


class Scorer(Protocol):
    """The reward services."""

    @property
    def is_accepting(self) -> bool: ...

    async def score(self, request: ScoreRequest) -> Score: ...


class Player(Protocol):
    """Makes the samples of one run."""

    num_cut_observations: int  # observations cut so far

    async def play(self, sample: SampleTask, written: WrittenSoFar | None = None) -> Trajectory:
        """Return the finished trajectory. written: updated with each turn. Raises: NeighbourError."""
