"""One sample in the hands of an agent: what it asks for, how it ends. All of it in the endpoint's event loop.

    opened -> taken by an agent -> [ turn ]* -> reward or finish reported    -> trained
                                             -> silent, failed, taken back   -> the sample's lease goes back

Once it has ended, however that was, everything that comes is answered 410 with the reason.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from protocol.errors import NeighbourError
from protocol.one_line import described
from protocol.settings.rollout import AgentsSettings
from rollout.endpoint.bodies import Drawn, RewardBody
from rollout.endpoint.branches import Branches, Place, SaidTurn
from rollout.endpoint.refusals import Refused
from rollout.endpoint.rendering import Asked, Rendering
from rollout.endpoint.retries import Retries
from rollout.endpoint.sample_turns import Ended, NoRoom, SampleTurns, TurnAsked, Written
from rollout.endpoint.session_end import SessionEnd
from rollout.endpoint.turn_text import TurnText
from rollout.episodes.sample import AGENT


@dataclass(frozen=True)
class Turned:
    """An answer to a request for a turn."""

    id: str  # of the answer
    created: int  # Unix seconds
    text: TurnText  # what the policy wrote, as the agent reads it
    num_prompt_tokens: int  # of the conversation before the turn
    num_tokens: int  # of the turn
    policy_version: int  # that wrote its last token
    hear: Callable[[], None]  # notes that it is sent to the agent


class AgentSession:
    """Made in any thread, used in the endpoint's event loop."""

    def __init__(self, turns: SampleTurns, rendering: Rendering, settings: AgentsSettings, drawn: Drawn) -> None:
        self.end = SessionEnd(f"session-{secrets.token_hex(8)}", f"sluice-{secrets.token_urlsafe(24)}")
        self.turns = turns
        self.settings = settings
        self.drawn = drawn
        self.retries: Retries[Turned] = Retries()
        self._rendering = rendering
        self._branches = Branches()
        self._is_out_of_room = False
        self._num_requests = 0
        self._active_at = 0.0
        self._watch: asyncio.TimerHandle | None = None

    # -- its life -----------------------------------------------------------------------------------------------------

    def take(self) -> None:
        """Give the sample to an agent: from here on it must not be silent."""
        self._active_at = time.monotonic()
        self._look_after(self.settings.idle_timeout_s)

    def wait_again(self) -> None:
        """Have no agent again: the one that took it never heard of it."""
        if self._watch is not None:
            self._watch.cancel()

    def report(self, reward: RewardBody | None) -> dict[str, Any]:
        """End it with a reward, or with none; returns what the agent is told. Raises: Refused."""
        told = self.end.report(reward)
        branch = self._branches.trained(self.settings.trained_conversation)
        given = reward or RewardBody(reward=0.0)
        self._end(
            Ended(
                trained=None if branch is None else branch.conversation,
                num_turns=0 if branch is None else branch.heard_turns,
                reward=None if reward is None else reward.reward,
                score=given.score,
                logs=dict(given.logs),
                num_dropped=sum(one.num_answers > 0 for one in self._branches.branches) - (branch is not None),
                is_out_of_room=self._is_out_of_room,
            ),
        )
        return told

    def returned(self, reward: RewardBody | None) -> None:
        """End it by what its program returned, unless the program reported before."""
        if self.end.because is None:
            self.report(reward)

    def fail(self, error: NeighbourError) -> None:
        """End it: the sample is not made."""
        if self.end.because is None:
            self.end.because = f"{error}. Its sample goes out again"
            self._end(Ended(error=error))

    def take_back(self, why: str) -> None:
        """End it for those who asked for the sample; they know already."""
        if self.end.because is None:
            self.end.because = why
            self._end(None)

    def _end(self, how: Ended | None) -> None:
        if self._watch is not None:
            self._watch.cancel()
        self.retries.cancel()
        if how is not None:
            self.turns.end(how)

    def _look_after(self, in_s: float) -> None:
        self._watch = asyncio.get_running_loop().call_later(in_s, self._on_silence)

    def _on_silence(self) -> None:
        """Fail the sample when its agent was silent too long; else look again when it could be."""
        limit_s = self.settings.idle_timeout_s
        left_s = self._active_at + limit_s - time.monotonic()
        if self.retries.num_under_way:
            left_s = limit_s
        if left_s > 0.0:
            self._look_after(left_s)
            return
        self.fail(NeighbourError(AGENT, f"asked nothing for agents.idle_timeout_s = {limit_s:g} s"))

    # -- turns --------------------------------------------------------------------------------------------------------

    async def turn(self, asked: Asked, stop: tuple[str, ...], max_tokens: int | None, has_logprobs: bool) -> Turned:
        """Return the policy's next turn of the conversation that a request goes on with.

        Raises: Refused with the reason; a failure beside us ends the session.
        """
        self._num_requests += 1
        if self._num_requests > self.settings.max_requests:
            raise Refused(400, f"more than agents.max_requests = {self.settings.max_requests} requests in one session")
        place = self._branches.place(asked.kind, asked.said)
        try:
            written = await self._written(asked, place, stop, max_tokens)
            text = await self._rendering.read(written.generation, asked.may_call, has_logprobs)
        except (Refused, NeighbourError, asyncio.CancelledError):
            raise
        except Exception as error:  # what is noted of the conversation may not be what was written in it
            self.fail(NeighbourError("sample", described(error)))
            raise
        finally:
            place.branch.is_busy = False
            self._active_at = time.monotonic()
            if place.branch.conversation is None:
                self._branches.forget(place.branch)
        said = asked.with_turn(text)
        branch, tokens = place.branch, written.generation.tokens
        turn = SaidTurn(len(said), tokens[-1], asked.endings(text), written.num_model_tokens)
        number = self._branches.answered(branch, said, turn, asked.with_stop(text))
        return Turned(
            f"turn-{secrets.token_hex(12)}",
            int(time.time()),
            text,
            written.num_before,
            len(tokens),
            written.generation.version_spans[-1][2],
            lambda: self._branches.hear(branch, number),
        )

    async def _written(self, asked: Asked, place: Place, stop: Sequence[str], max_tokens: int | None) -> Written:
        branch = place.branch
        if self.settings.trained_conversation == "only" and len(self._branches.branches) > 1:
            problem = "does not go on with what was said in this session, and agents.trained_conversation = only"
            raise Refused(400, f"the request {problem}: send what was said before as it was answered", "messages")
        last = branch.turns[-1] if branch.turns else None
        tokens = await self._rendering.tokens(asked, place.new_from, last)
        turn = TurnAsked(
            branch.number, tokens, branch.conversation, place.parted_from, place.num_turns, tuple(stop), max_tokens
        )
        try:
            written = await self.turns.ask(turn)
        except NoRoom:
            self._is_out_of_room = True
            problem = "what is said leaves no room for an answer in rollout.max_context_tokens"
            raise Refused(400, problem, "messages", "context_length_exceeded") from None
        except NeighbourError as error:
            if error.boundary == "prompt":
                raise Refused(400, error.detail, "messages") from None
            self.fail(error)
            raise
        branch.conversation = written.conversation
        return written
