"""A sample, the interfaces that its player needs, and its conversation: turns, replies, and the trajectory at the end.

    begin(prompt) -> [ next_turn -> observe ]* -> finish_scored -> Trajectory

The caller provides the replies. The transcript is plain data: `take_up` continues it here or on another server.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Literal, Protocol

import msgspec

from protocol.errors import FrameError, NeighbourError
from protocol.settings.rollout import RolloutSettings, SamplingSettings
from protocol.wire.trajectory import MAX_CALLS, Finish, TimedCall, Trajectory, TrajectoryFacts
from rollout.engine.generation import EngineStats, Generation, Sampling
from rollout.engine.version_gate import VersionGate
from rollout.environments.base import Task
from rollout.environments.guard import ENVIRONMENT, GuardedEnvironment
from rollout.environments.timed_calls import record_calls
from rollout.episodes.chat_tokens import control_tokens
from rollout.episodes.transcript import Transcript, final_answer
from rollout.neighbours.reward_client import Score, ScoreRequest

_MAX_LOGS = 64
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
    on_tokens: Callable[[str, int], None]  # called with (request id, number of new tokens) as they come

    @property
    def is_alive(self) -> bool:
        """False once it has crashed; it never comes back."""
        ...

    @property
    def stats(self) -> EngineStats: ...

    @property
    def tokenizer(self) -> Any: ...

    @property
    def end_tokens(self) -> frozenset[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    async def generate(self, prompt_tokens: Sequence[int], sampling: Sampling, request_id: str) -> Generation: ...


class Scorer(Protocol):
    """The reward services."""

    @property
    def is_accepting(self) -> bool: ...

    async def score(self, request: ScoreRequest) -> Score: ...


class Player(Protocol):
    """Makes the samples of one run."""

    async def play(self, sample: SampleTask, written: WrittenSoFar | None = None) -> Trajectory:
        """Return the finished trajectory. written: updated with each turn. Raises: NeighbourError."""


class Conversations:
    """Begins conversations with one engine, under one run's limits."""

    def __init__(
        self,
        engine: Generator,
        gate: VersionGate,
        settings: RolloutSettings,
        server: str,
        sampling: SamplingSettings | None = None,
    ) -> None:
        """server: name on the trajectories. sampling: None for the whole distribution."""
        self.sampling = sampling or SamplingSettings()
        self.engine = engine
        self.gate = gate
        self.settings = settings
        self.server = server
        # Requests are numbered: an aborted one of the same sample may still be in the engine.
        self.numbers = itertools.count()
        self._control_ids = control_tokens_but_tags(engine.tokenizer, engine.end_tokens)

    def begin(
        self,
        sample: SampleTask,
        prompt_tokens: Sequence[int],
        written: WrittenSoFar | None = None,
        number: int = 0,
    ) -> "Conversation":
        """Return a conversation that begins with a prompt. written: updated with each turn.

        number: index among the sample's conversations; each draws its own turns.
        Raises: NeighbourError("prompt") for a prompt that leaves no room for a token.
        """
        limit = self.settings.max_context_tokens
        if not 0 < len(prompt_tokens) < limit:
            raise NeighbourError("prompt", f"has {len(prompt_tokens)} tokens; rollout.max_context_tokens = {limit}")
        return self.take_up(sample, Transcript.begin(prompt_tokens), written, number)

    def without_control_tokens(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens without the control tokens of the policy's tokenizer."""
        return self.engine.decode([token for token in tokens if token not in self._control_ids])

    def take_up(
        self, sample: SampleTask, transcript: Transcript, written: WrittenSoFar | None = None, number: int = 0
    ) -> "Conversation":
        """Return the conversation that continues a transcript. number: as in `begin`."""
        return Conversation(self, sample, transcript, written or WrittenSoFar(), number)


class Conversation:
    """One conversation; made by `Conversations`."""

    def __init__(
        self,
        shared: Conversations,
        sample: SampleTask,
        transcript: Transcript,
        written: WrittenSoFar,
        number: int,
    ) -> None:
        self.sample = sample
        self.transcript = transcript
        self._shared = shared
        self._written = written
        self._number = number

    @property
    def is_full(self) -> bool:
        """True once no further token has room."""
        return len(self.transcript) >= self._shared.settings.max_context_tokens

    async def next_turn(self, stop: tuple[str, ...] = (), max_tokens: int | None = None) -> Generation:
        """Return the policy's next turn, which is appended to the transcript. Waits while weights change.

        stop: strings that end the turn; they stay in it. max_tokens: a limit below the settings'; None: the settings'.
        Raises: NeighbourError("engine") when no usable turn came within rollout.turn_timeout_s.
        """
        settings, transcript = self._shared.settings, self.transcript
        is_greedy = self.sample.task.is_greedy
        drawn = self._shared.sampling
        if drawn.only_eval and self.sample.kind != "eval":
            drawn = SamplingSettings()
        sampling = Sampling(
            max_tokens=min(
                settings.max_response_tokens,
                settings.max_context_tokens - len(transcript),
                settings.max_response_tokens if max_tokens is None else max_tokens,
            ),
            temperature=self.sample.temperature or settings.temperature,
            stop=(*stop, *(text for text in drawn.stop if text not in stop)),
            top_p=drawn.top_p,
            top_k=drawn.top_k,
            min_p=drawn.min_p,
            logit_bias=drawn.logit_bias,
            seed=None if is_greedy else _seed_of(self.sample, len(transcript.turns), self._number),
            greedy=is_greedy,
        )
        started_at, clock = time.time(), time.perf_counter()
        generation = await self._generate(sampling)
        transcript.generate_s += time.perf_counter() - clock
        transcript.add_turn(generation, started_at)
        return generation

    def observe(self, tokens: Sequence[int]) -> bool:
        """Append a reply to the policy. Return False, and append nothing, when it leaves no room for a turn."""
        if len(self.transcript) + len(tokens) >= self._shared.settings.max_context_tokens:
            return False
        self.transcript.add_observation(tokens)
        return True

    async def finish_scored(self, how: Finish, prompt: str, response: str, scorer: Scorer) -> Trajectory:
        """Return the trajectory with the reward services' reward.

        An environment's reward is added as the part "environment". Its score replaces the services' score, and its logs
        come first. prompt, response: decoded tokens, names of control tokens kept.
        Raises: NeighbourError naming "reward:<name>", or "trajectory" for one that cannot be trained.
        """
        clock, sample, own = time.perf_counter(), self.sample, self.transcript
        text = self._shared.without_control_tokens(own.response_tokens)
        task, num_turns = sample.task, len(own.turns)
        with record_calls() as calls:
            score = await scorer.score(
                ScoreRequest(sample.key, prompt, response, task.label, task.columns, text, num_turns)
            )
        reward_s = time.perf_counter() - clock
        reward, parts = score.reward, dict(score.parts)
        if own.reward is not None:
            reward, parts = reward + own.reward, {**parts, ENVIRONMENT: own.reward}
        own_logs = {f"{ENVIRONMENT}/{name}": value for name, value in own.logs.items()}
        logs = {**own_logs, **score.logs}
        try:
            facts = msgspec.structs.replace(
                self._facts(how, reward, parts, reward_s, calls),
                reward_score=score.filter_score if own.score is None else own.score,
                reward_logs=dict(itertools.islice(logs.items(), _MAX_LOGS)),
            )
            return own.to_trajectory(facts)
        except FrameError as error:
            raise NeighbourError("trajectory", str(error)) from error

    async def _generate(self, sampling: Sampling) -> Generation:
        shared, limit_s = self._shared, self._shared.settings.turn_timeout_s
        request_id = f"{self.sample.key}/{len(self.transcript.turns)}-{next(shared.numbers)}"
        deadline, num_invalidated = asyncio.timeout(limit_s), shared.gate.num_invalidated
        try:
            async with deadline:
                await shared.gate.wait_open()
                num_invalidated = shared.gate.num_invalidated
                with shared.gate.writing(deadline):
                    generation = await shared.engine.generate(self.transcript.tokens, sampling, request_id)
                    if generation.version_spans:
                        await shared.gate.wait_verified(generation.version_spans[-1][2])
        except TimeoutError:
            if not deadline.expired():
                raise
            if shared.gate.num_invalidated > num_invalidated:
                wrong = f"request {request_id} was dropped: its weights differ from the learner's"
                raise NeighbourError("engine", wrong) from None
            late = f"request {request_id} gave no generation within rollout.turn_timeout_s = {limit_s:g} s"
            raise NeighbourError("engine", late) from None
        self._written.num_model_tokens += len(generation.tokens)
        if generation.finish_reason not in ("stop", "length") or not generation.tokens:
            ending = f"{len(generation.tokens)} tokens and the reason {generation.finish_reason}"
            raise NeighbourError("engine", f"request {request_id} ended with {ending}")
        return generation

    def _facts(
        self, how: Finish, reward: float, parts: Mapping[str, float], reward_s: float, scored: Sequence[TimedCall]
    ) -> TrajectoryFacts:
        sample, transcript = self.sample, self.transcript
        calls = [*(call for turn in transcript.turns for call in turn.calls), *scored]
        return TrajectoryFacts(
            group=sample.group,
            sample_index=sample.sample_index,
            attempt=sample.attempt,
            incarnation=sample.incarnation,
            kind=sample.kind,
            is_greedy=sample.task.is_greedy,
            server=self._shared.server,
            num_tokens=len(transcript),
            num_prompt_tokens=transcript.num_prompt_tokens,
            num_turns=len(transcript.turns),
            finish=how,
            reward=reward,
            reward_parts=dict(parts),
            turn_rewards=[each for each in transcript.turn_rewards if each.end < transcript.turns[-1].end],
            version_spans=transcript.version_spans,
            started_at=transcript.started_at,
            finished_at=time.time(),
            generate_s=transcript.generate_s,
            environment_s=transcript.environment_s,
            reward_s=reward_s,
            content_hashes=transcript.content_hashes[:16],
            calls=calls[:MAX_CALLS],
            answer=self._answer() if sample.kind == "eval" else msgspec.UNSET,
        )

    def _answer(self) -> str:
        """Return the final answer of the last turn, without the end token, which would be a part of its last line."""
        last = self.transcript.turns[-1]
        return final_answer(self._shared.without_control_tokens(self.transcript.tokens[last.start : last.end]))


def _seed_of(sample: SampleTask, turn: int, number: int) -> int:
    """Return a turn's seed, from the run's seed, the sample's attempt, the conversation and the turn."""
    conversation = f"{number}:" if number else ""
    return int.from_bytes(sha256(f"{sample.seed}/{sample.key}/{conversation}{turn}".encode()).digest()[:6])


def control_tokens_but_tags(tokenizer: Any, ends: Collection[int] = ()) -> frozenset[int]:
    """Return the control tokens without pairs such as `<think>` and `</think>`, which are part of a response's text."""
    control = control_tokens(tokenizer, ends)
    names = set(control.values())
    others = {getattr(tokenizer, f"{kind}_token_id", None) for kind in ("bos", "eos", "pad")}  # may be <s> and </s>

    def is_tag(token: int) -> bool:
        name = control[token]
        other = f"<{name[2:]}" if name.startswith("</") else f"</{name[1:]}"
        return name.startswith("<") and other in names and token not in others

    return frozenset(token for token in control if not is_tag(token))
