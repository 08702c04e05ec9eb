"""Plays one sample: prompt -> (turn -> observation)* -> reward -> trajectory.

Token in, token out: what the engine sampled is what is
trained; earlier turns are never tokenised again. What fails beside us leaves as NeighbourError, never as data.
"""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from typing import Literal, TypeVar

from protocol.errors import FrameError, NeighbourError
from protocol.settings.rollout import RolloutSettings
from protocol.wire.trajectory import Trajectory, TrajectoryFacts
from rollout.engine.generation import Generation, Sampling
from rollout.engine.version_gate import VersionGate
from rollout.environments.base import MakeEnvironment, Observation, Prompt, Resources, Step, Turn
from rollout.environments.guard import ENVIRONMENT, GuardedEnvironment
from rollout.episodes.chat_tokens import ChatTokens
from rollout.episodes.sample import Finish, Generator, Sample, Scorer, WrittenSoFar
from rollout.episodes.transcript import Transcript
from rollout.neighbours.reward_client import Score, ScoreRequest

T = TypeVar("T")


class EpisodePlayer:
    """Plays samples of one run. Keeps no state between them but counters."""

    def __init__(
        self,
        engine: Generator,
        gate: VersionGate,
        make_environment: MakeEnvironment,
        resources: Resources,
        scorer: Scorer,
        settings: RolloutSettings,
        server: str,
    ) -> None:
        self._engine = engine
        self._gate = gate
        self._make_environment = make_environment
        self._resources = resources
        self._scorer = scorer
        self._settings = settings
        self._server = server
        self._text = ChatTokens(engine.tokenizer)
        self._request_numbers = itertools.count()
        self.num_cut_observations = 0

    async def play(self, sample: Sample, written: WrittenSoFar | None = None) -> Trajectory:
        """Return the finished trajectory. written: counts up with each turn that the engine ends.

        Raises: NeighbourError naming "engine", "retriever", "reward:<name>", "environment", "prompt" or "trajectory".
        """
        episode = _Episode(sample, written or WrittenSoFar())
        with episode.measure("environment_s"):
            environment = GuardedEnvironment(self._make_environment, self._resources, self._settings.turn_timeout_s)
            prompt = await environment.reset(sample.task)
        transcript = Transcript(self._prompt_tokens(prompt))
        episode.finish = await self._converse(environment, episode, transcript)
        with episode.measure("reward_s"):
            score = await self._score(sample, transcript)
        try:
            return transcript.to_trajectory(_facts(episode, transcript, score, self._server))
        except FrameError as error:
            raise NeighbourError("trajectory", str(error)) from error

    async def _converse(self, environment: GuardedEnvironment, episode: "_Episode", transcript: Transcript) -> Finish:
        """Play turns until the environment or the context ends the conversation; returns which."""
        while True:
            room = self._settings.max_context_tokens - len(transcript)
            with episode.measure("generate_s"):
                generation = await self._generate(environment.stop, episode, transcript, room)
            transcript.add_turn(generation)
            turn = _turn_of(generation)
            with episode.measure("environment_s"):
                step = await environment.step(turn)
            episode.add_reward(step)
            if step.is_done:
                return _finish_of(step, turn, is_context_full=len(transcript) >= self._settings.max_context_tokens)
            assert not isinstance(step.observation, str)  # the guard has made an Observation of it
            observation = self._observation_tokens(step.observation)
            if len(transcript) + len(observation) >= self._settings.max_context_tokens:
                return "context"
            transcript.add_observation(observation)

    async def _generate(
        self, stop: tuple[str, ...], episode: "_Episode", transcript: Transcript, room: int
    ) -> Generation:
        settings, sample = self._settings, episode.sample
        sampling = Sampling(
            max_tokens=min(settings.max_response_tokens, room),
            temperature=settings.temperature,
            stop=stop,
            seed=None if sample.task.is_greedy else _seed_of(sample, transcript.num_turns),
            greedy=sample.task.is_greedy,
        )
        # Numbered, because an aborted request of the same sample may still be leaving the engine.
        request_id = f"{sample.key}/{transcript.num_turns}-{next(self._request_numbers)}"
        call = self._generate_when_synced(transcript.tokens, sampling, request_id)
        generation = await self._within(call, "engine", f"request {request_id} gave no generation")
        episode.written.num_model_tokens += len(generation.tokens)
        if generation.finish_reason not in ("stop", "length") or not generation.tokens:
            ending = f"{len(generation.tokens)} tokens and the reason {generation.finish_reason}"
            raise NeighbourError("engine", f"request {request_id} ended with {ending}")
        return generation

    async def _generate_when_synced(self, tokens: list[int], sampling: Sampling, request_id: str) -> Generation:
        await self._gate.passed()
        return await self._engine.generate(tokens, sampling, request_id)

    def _prompt_tokens(self, prompt: Prompt) -> list[int]:
        tokens = self._text.prompt(prompt)
        limit = self._settings.max_context_tokens
        if not 0 < len(tokens) < limit:
            raise NeighbourError("prompt", f"has {len(tokens)} tokens; rollout.max_context_tokens = {limit}")
        return tokens

    def _observation_tokens(self, observation: Observation | None) -> list[int]:
        if observation is None:
            return []
        tokens, is_cut = self._text.observation(observation, self._settings.max_observation_tokens)
        self.num_cut_observations += is_cut
        return tokens

    async def _score(self, sample: Sample, transcript: Transcript) -> Score:
        decode = self._engine.decode
        prompt = decode(transcript.tokens[: transcript.num_prompt_tokens])
        response = decode(transcript.response_tokens)
        return await self._scorer.score(
            ScoreRequest(sample.key, prompt, response, sample.task.label, sample.task.columns)
        )

    async def _within(self, call: Awaitable[T], boundary: str, complaint: str) -> T:
        limit_s = self._settings.turn_timeout_s
        deadline = asyncio.timeout(limit_s)
        try:
            async with deadline:
                return await call
        except TimeoutError:
            if not deadline.expired():
                raise
            raise NeighbourError(boundary, f"{complaint} within rollout.turn_timeout_s = {limit_s:g} s") from None


class _Episode:
    """What is noted about one sample while it is played."""

    def __init__(self, sample: Sample, written: WrittenSoFar) -> None:
        self.sample = sample
        self.written = written
        self.finish: Finish = "stop"
        self.started_at = time.time()
        self.seconds = {"generate_s": 0.0, "environment_s": 0.0, "reward_s": 0.0}
        self.reward: float | None = None

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - started

    def add_reward(self, step: Step) -> None:
        if step.reward is not None:
            self.reward = (self.reward or 0.0) + step.reward


def _turn_of(generation: Generation) -> Turn:
    finish: Literal["stop", "length"] = "length" if generation.finish_reason == "length" else "stop"
    return Turn(generation.text, finish, generation.stop_string)


def _finish_of(step: Step, turn: Turn, is_context_full: bool) -> Finish:
    if turn.finish == "length" and is_context_full and step.finish != "answer":
        return "context"
    return step.finish or turn.finish


def _seed_of(sample: Sample, turn: int) -> int:
    """Return a seed that the run's seed, the sample and its turn decide; another attempt draws anew."""
    return int.from_bytes(sha256(f"{sample.seed}/{sample.key}/{turn}".encode()).digest()[:6])


def _facts(episode: _Episode, transcript: Transcript, score: Score, server: str) -> TrajectoryFacts:
    sample = episode.sample
    parts = dict(score.parts)
    if episode.reward is not None:
        parts[ENVIRONMENT] = episode.reward
    return TrajectoryFacts(
        group=sample.group,
        sample_index=sample.sample_index,
        attempt=sample.attempt,
        incarnation=sample.incarnation,
        kind=sample.kind,
        is_greedy=sample.task.is_greedy,
        server=server,
        num_tokens=len(transcript),
        num_prompt_tokens=transcript.num_prompt_tokens,
        num_turns=transcript.num_turns,
        finish=episode.finish,
        reward=score.reward + (episode.reward or 0.0),
        reward_parts=parts,
        version_spans=transcript.version_spans,
        started_at=episode.started_at,
        finished_at=time.time(),
        **episode.seconds,
    )
