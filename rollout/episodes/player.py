"""Plays one sample: prompt -> (turn -> observation)* -> reward -> trajectory.

Token in, token out: the sampled tokens are trained, and earlier turns are never tokenised again. A failure of a
neighbour leaves as NeighbourError, never as data.
"""

import copy
import time
from collections.abc import Set
from typing import Any, Literal

from protocol.errors import NeighbourError
from protocol.settings.rollout import RolloutSettings, SamplingSettings
from protocol.wire.trajectory import Finish, Trajectory
from rollout.engine.generation import Generation
from rollout.engine.version_gate import VersionGate
from rollout.environments.base import Chat, MakeEnvironment, Messages, Observation, Resources, Step, Turn
from rollout.environments.guard import ENVIRONMENT, GuardedEnvironment
from rollout.environments.timed_calls import record_calls, timed_call
from rollout.episodes.chat_tokens import ChatTokens
from rollout.episodes.conversation import (
    Conversation,
    Conversations,
    Generator,
    SampleTask,
    Scorer,
    TurnListener,
    WrittenSoFar,
)
from rollout.episodes.transcript import Transcript
from rollout.neighbours.retriever_client import record_sources

# Logs of a sample: the share of its searches that another node's retriever answered; its replies that were cut.
SEARCHED_ELSEWHERE, CUT_REPLIES = "searched_elsewhere", "cut_replies"


class EpisodePlayer:
    """Plays samples of one run. Its only state between them is a counter."""

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
        """server, sampling: as in `Conversations`."""
        self._decode = engine.decode
        self._text = ChatTokens(engine.tokenizer, settings.chat_template_kwargs, engine.end_tokens)
        self._conversations = Conversations(engine, gate, settings, server, sampling)
        self._make_environment = make_environment
        self._resources = resources
        self._scorer = scorer
        self._settings = settings

    async def play(self, sample: SampleTask, written: WrittenSoFar | None = None) -> Trajectory:
        """Return the finished trajectory. written: updated with each turn.

        Raises: NeighbourError naming "engine", "retriever", "reward:<name>", "environment", "prompt" or "trajectory".
        """
        written = written or WrittenSoFar()
        environment = GuardedEnvironment(self._make_environment, self._resources, self._settings.turn_timeout_s)
        try:
            with record_sources() as sources:
                conversation, tools = await self._begin(environment, sample, written)
                sources.content_hashes.update(conversation.transcript.content_hashes)
                how = await self._converse(environment, conversation, tools, sources.content_hashes, written.listener)
        finally:
            await environment.close()
        transcript = conversation.transcript
        transcript.content_hashes = sorted(sources.content_hashes)
        if sources.num_with_fallback:
            transcript.add_figures(None, {SEARCHED_ELSEWHERE: sources.num_elsewhere / sources.num_with_fallback})
        prompt, response = map(self._decode, (transcript.prompt_tokens, transcript.response_tokens))
        trajectory = await conversation.finish_scored(how, prompt, response, self._scorer)
        if not trajectory.facts.reward_parts and how not in ("context", "time"):
            problem = "gave no reward, and rewards.endpoints is empty. Give Step(reward=..), 0.0 for a failure too"
            raise NeighbourError(ENVIRONMENT, problem)
        return trajectory

    async def _begin(
        self, environment: GuardedEnvironment, sample: SampleTask, written: WrittenSoFar
    ) -> tuple[Conversation, list[dict[str, Any]]]:
        """Return the conversation with its prompt, and the prompt's tools."""
        started_at, clock = time.time(), time.perf_counter()
        prompt = await environment.reset(copy.deepcopy(sample.task))  # it may use up its row, which reward services get
        environment_s = time.perf_counter() - clock
        earlier = await written.listener.take_up(environment) if written.listener is not None else None
        if earlier is not None:
            conversation = self._conversations.take_up(sample, earlier, written)
            written.num_model_tokens = earlier.num_model_tokens
        else:
            tokens, settings = self._text.prompt(prompt), self._settings
            if settings.truncate_left:
                tokens = tokens[-max(1, settings.max_context_tokens - settings.max_response_tokens) :]
            conversation = self._conversations.begin(sample, tokens, written)
            conversation.transcript.started_at = started_at
        conversation.transcript.environment_s += environment_s
        return conversation, prompt.tools if isinstance(prompt, Chat) else []

    async def _converse(
        self,
        environment: GuardedEnvironment,
        conversation: Conversation,
        tools: list[dict[str, Any]],
        sources: Set[str],
        listener: TurnListener | None,
    ) -> Finish:
        """Play turns up to the end by environment, context or time; return which.

        tools: the prompt's tools. sources: content hashes of the searches so far.
        """
        transcript = conversation.transcript
        while True:
            turn = self._turn_of(await conversation.next_turn(environment.stop))
            if listener is not None:
                await listener.before_step()
            clock = time.perf_counter()
            with record_calls() as calls, timed_call("environment", "step"):
                step = await environment.step(turn)
            transcript.environment_s += time.perf_counter() - clock
            transcript.add_calls(calls)
            transcript.add_reward(step.reward)
            transcript.add_figures(step.score, step.logs)
            if step.is_done:
                return _finish_of(step, turn, conversation.is_full)
            if self._is_out_of_time(transcript):
                return "time"
            if not conversation.observe(self._observation_tokens(step.observation, tools, transcript)):
                return "context"
            if listener is not None:
                transcript.content_hashes = sorted(sources)
                listener.on_turn_finished(transcript, environment)

    def _turn_of(self, generation: Generation) -> Turn:
        content = self._conversations.without_control_tokens(generation.tokens)
        finish: Literal["length", "stop"] = "length" if generation.finish_reason == "length" else "stop"
        return Turn(generation.text, finish, generation.stop_string, content)

    def _is_out_of_time(self, transcript: Transcript) -> bool:
        # Not by the clock: another server with another clock may have begun the conversation.
        limit_s = self._settings.max_conversation_s
        return limit_s is not None and transcript.generate_s + transcript.environment_s > limit_s

    def _observation_tokens(
        self, observation: Observation | str | Messages | None, tools: list[dict[str, Any]], transcript: Transcript
    ) -> list[int]:
        assert not isinstance(observation, str)  # the guard turned it into an Observation
        if observation is None:
            return []
        limit = self._settings.max_observation_tokens
        if isinstance(observation, list):
            tokens, is_cut = self._text.reply(observation, tools, transcript.tokens[-1], limit)
        else:
            tokens, is_cut = self._text.observation(observation, limit)
        transcript.add_figures(None, {CUT_REPLIES: transcript.logs.get(CUT_REPLIES, 0.0) + is_cut})
        return tokens


def _finish_of(step: Step, turn: Turn, is_context_full: bool) -> Finish:
    if turn.finish == "length" and is_context_full and step.finish != "answer":
        return "context"
    return step.finish or turn.finish
