"""Plays one sample: prompt -> (turn -> observation)* -> reward -> trajectory.

Token in, token out: what the engine sampled is what is trained; earlier turns are never tokenised again. What fails
beside us leaves as NeighbourError, never as data.
"""

import time
from collections.abc import Iterator, Set
from contextlib import contextmanager
from typing import Any

from protocol.settings.rollout import RolloutSettings, SamplingSettings
from protocol.wire.trajectory import Finish, Trajectory
from rollout.engine.generation import Generation
from rollout.engine.version_gate import VersionGate
from rollout.environments.base import Chat, MakeEnvironment, Messages, Observation, Resources, Step, Turn
from rollout.environments.guard import GuardedEnvironment
from rollout.episodes.chat_tokens import ChatTokens
from rollout.episodes.conversation import Conversation, Conversations
from rollout.episodes.sample import Generator, SampleTask, Scorer, TurnKeeper, WrittenSoFar
from rollout.episodes.scoring import finish_scored
from rollout.episodes.transcript import Transcript
from rollout.neighbours.sources import record_sources

# A log of the sample: the share of its searches that another node's retriever answered.
SEARCHED_ELSEWHERE = "searched_elsewhere"


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
        sampling: SamplingSettings | None = None,
    ) -> None:
        """server, sampling: as `Conversations` takes them."""
        self._decode = engine.decode
        self._text = ChatTokens(engine.tokenizer)
        self._conversations = Conversations(engine, gate, settings, server, sampling)
        self._make_environment = make_environment
        self._resources = resources
        self._scorer = scorer
        self._settings = settings
        self.num_cut_observations = 0

    async def play(self, sample: SampleTask, written: WrittenSoFar | None = None) -> Trajectory:
        """Return the finished trajectory. written: counts up with each turn that the engine ends.

        Raises: NeighbourError naming "engine", "retriever", "reward:<name>", "environment", "prompt" or "trajectory".
        """
        written = written or WrittenSoFar()
        environment = GuardedEnvironment(self._make_environment, self._resources, self._settings.turn_timeout_s)
        try:
            with record_sources() as sources:
                conversation, tools = await self._begun(environment, sample, written)
                sources.content_hashes.update(conversation.transcript.content_hashes)
                how = await self._converse(environment, conversation, tools, sources.content_hashes, written.keeper)
        finally:
            await environment.close()
        conversation.transcript.content_hashes = sorted(sources.content_hashes)
        if sources.num_with_fallback:
            share = sources.num_elsewhere / sources.num_with_fallback
            conversation.transcript.add_figures(None, {SEARCHED_ELSEWHERE: share})
        transcript = conversation.transcript
        prompt, response = map(self._decode, (transcript.prompt_tokens, transcript.response_tokens))
        return await finish_scored(conversation, how, prompt, response, self._scorer)

    async def _begun(
        self, environment: GuardedEnvironment, sample: SampleTask, written: WrittenSoFar
    ) -> tuple[Conversation, list[dict[str, Any]]]:
        """Return the conversation with its prompt, or as far as another server had it, and the tools it is told of."""
        started_at, clock = time.time(), time.perf_counter()
        prompt = await environment.reset(sample.task)
        environment_s = time.perf_counter() - clock
        if (before := sample.before) is not None and environment.can_resume:
            await environment.resume(before.snapshot)
            conversation = self._conversations.take_up(sample, before.transcript, written)
            written.num_model_tokens = before.transcript.num_model_tokens
        else:
            conversation = self._conversations.begin(sample, self._text.prompt(prompt), written)
            conversation.transcript.started_at = started_at
        conversation.transcript.environment_s += environment_s
        return conversation, prompt.tools if isinstance(prompt, Chat) else []

    async def _converse(
        self,
        environment: GuardedEnvironment,
        conversation: Conversation,
        tools: list[dict[str, Any]],
        sources: Set[str],
        keeper: TurnKeeper | None,
    ) -> Finish:
        """Play turns until the environment, the context or the time ends the conversation; returns which.

        tools: that the prompt told the policy of. sources: content hashes of what was searched so far. keeper: has the
        turn before kept before the environment is asked again: what a tool did for a turn it does once.
        """
        transcript = conversation.transcript
        while True:
            turn = _turn_of(await conversation.next_turn(environment.stop))
            if keeper is not None:
                await keeper.until_kept()
            with _environment_timed(transcript):
                step = await environment.step(turn)
            transcript.add_reward(step.reward)
            transcript.add_figures(step.score, step.logs)
            if step.is_done:
                return _finish_of(step, turn, conversation.is_full)
            if self._is_out_of_time(transcript):
                return "time"
            if not conversation.observe(self._observation_tokens(step.observation, tools, transcript.tokens[-1])):
                return "context"
            if keeper is not None and (snapshot := environment.snapshot()) is not None:
                transcript.content_hashes = sorted(sources)
                keeper.keep(transcript, snapshot)

    def _is_out_of_time(self, transcript: Transcript) -> bool:
        # Not by the clock: another server may have begun it, and its clock may be another.
        limit_s = self._settings.max_conversation_s
        return limit_s is not None and transcript.generate_s + transcript.environment_s > limit_s

    def _observation_tokens(
        self, observation: Observation | str | Messages | None, tools: list[dict[str, Any]], last_token: int
    ) -> list[int]:
        assert not isinstance(observation, str)  # the guard has made an Observation of it
        if observation is None:
            return []
        limit = self._settings.max_observation_tokens
        if isinstance(observation, list):
            tokens, is_cut = self._text.reply(observation, tools, last_token, limit)
        else:
            tokens, is_cut = self._text.observation(observation, limit)
        self.num_cut_observations += is_cut
        return tokens


@contextmanager
def _environment_timed(transcript: Transcript) -> Iterator[None]:
    started = time.perf_counter()
    yield
    transcript.environment_s += time.perf_counter() - started


def _turn_of(generation: Generation) -> Turn:
    return Turn(generation.text, "length" if generation.finish_reason == "length" else "stop", generation.stop_string)


def _finish_of(step: Step, turn: Turn, is_context_full: bool) -> Finish:
    if turn.finish == "length" and is_context_full and step.finish != "answer":
        return "context"
    return step.finish or turn.finish
