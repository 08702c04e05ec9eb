"""One sample in the hands of an agent: its key, its turns, its end. All of it in the engine's event loop.

    opened -> taken by an agent -> [ turn ]* -> reward or finish reported    -> trained
                                             -> silent, failed, taken back   -> the lease goes back

After the end every request gets a 410 with the reason.
"""

import asyncio
import secrets
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from protocol.errors import NeighbourError
from protocol.one_line import describe_error
from protocol.settings.rollout import AgentsSettings
from protocol.wire.trajectory import Finish
from rollout.endpoint.branches import Branches, BranchTurn, Place
from rollout.endpoint.rendering import Rendering
from rollout.endpoint.requests import Refusal, RewardBody, SessionSampling
from rollout.endpoint.responses import Histories
from rollout.endpoint.retries import Retries
from rollout.endpoint.turns import TurnReply, TurnRequest
from rollout.engine.generation import Generation
from rollout.episodes.conversation import AGENT, Conversation, Conversations, SampleTask, WrittenSoFar

_REPORTED = "its end was reported"


class AgentResult(NamedTuple):
    """Result of a session after its agent's report."""

    conversation: Conversation  # conversation to train, with the agent's reward
    finish: Finish
    num_dropped: int  # conversations that are not trained


@dataclass
class SessionEnd:
    """Keys and end of a session, kept for late requests."""

    id: str
    api_key: str = field(repr=False)
    reason: str | None = None  # reason of the end; None: the session is open
    reported: RewardBody | None = None  # agent's reward; None: none

    def check_open(self) -> None:
        """Raise Refusal after the end."""
        if self.reason is not None:
            raise Refusal(410, f"session {self.id} has ended: {self.reason}", code="session_ended")

    def report(self, reward: RewardBody | None) -> dict[str, Any]:
        """Return the reply to a report. Only the first is counted.

        Raises: Refusal for a session with another end or another reward.
        """
        if self.reason == _REPORTED and reward == self.reported:
            return {"id": self.id, "counted": False, "detail": "this was reported before, and counted once"}
        self.check_open()
        self.reason, self.reported = _REPORTED, reward
        return {"id": self.id, "counted": True, "detail": "the sample is finished"}


class AgentSession:
    """A sample, played by an agent. `result` is set at its end; a failure is its exception."""

    def __init__(
        self,
        sample: SampleTask,
        conversations: Conversations,
        written: WrittenSoFar,
        rendering: Rendering,
        settings: AgentsSettings,
        sampling: SessionSampling,
    ) -> None:
        self.end = SessionEnd(f"session-{secrets.token_hex(8)}", f"sluice-{secrets.token_urlsafe(24)}")
        self.sample = sample
        self.settings = settings
        self.sampling = sampling
        self.retries = Retries()
        self.histories = Histories()
        self.result: asyncio.Future[AgentResult] = asyncio.get_running_loop().create_future()
        self._conversations = conversations
        self._written = written
        self._rendering = rendering
        self._branches = Branches()
        self._written_ids: dict[str, str] = {}  # id of a call as the agent has it -> as the policy wrote it
        self._num_requests = 0
        self._opened_at = time.time()
        self._active_at = 0.0
        self._watch: asyncio.TimerHandle | None = None

    def take(self) -> None:
        """Give the sample to an agent: its idle timeout begins."""
        self._active_at = time.monotonic()
        self._watch_idle(self.settings.idle_timeout_s)

    def offer_again(self) -> None:
        """Wait for an agent again: the last one left before it got the sample."""
        if self._watch is not None:
            self._watch.cancel()

    def report(self, reward: RewardBody | None) -> dict[str, Any]:
        """End the session with a reward, or with None; return the reply. Raises: Refusal."""
        reply = self.end.report(reward)
        if reply["counted"]:  # a repeated report must not add its reward again
            try:
                self._close(self._result(reward))
            except NeighbourError as error:
                self._close(error)
        return reply

    def on_program_end(self, reward: float | None) -> None:
        """End the session with its program's return value, unless the program reported before."""
        if self.end.reason is None:
            self.report(None if reward is None else RewardBody(reward=reward))

    def fail(self, error: NeighbourError) -> None:
        """End the session: the sample failed."""
        if self.end.reason is None:
            self.end.reason = f"{error}. Its sample goes out again"
            self._close(error)

    def take_back(self, reason: str) -> None:
        """End the session for its player, which expects no result."""
        if self.end.reason is None:
            self.end.reason = reason
            self._close(None)

    async def turn(self, request: TurnRequest) -> TurnReply:
        """Return the policy's next turn for a request. Raises: Refusal. A neighbour's failure ends the session."""
        self._num_requests += 1
        if self._num_requests > self.settings.max_requests:
            raise Refusal(400, f"more than agents.max_requests = {self.settings.max_requests} requests in one session")
        place = self._branches.place(request.kind, request.history, request.wordings)
        branch = place.branch
        try:
            num_before, generation = await self._generate(request, place)
            text = await self._rendering.run(self._rendering.read_turn, generation, request)
        except (Refusal, NeighbourError, asyncio.CancelledError):
            raise
        except Exception as error:  # the noted history may differ from the written turns
            self.fail(NeighbourError("sample", describe_error(error)))
            raise
        finally:
            branch.is_busy = False
            self._active_at = time.monotonic()
            if branch.conversation is None:
                self._branches.forget(branch)
        assert branch.conversation is not None
        self._written_ids |= {call.id: call.written_id for call in text.calls if call.written_id}
        history = [*request.history, text.unit]
        num_model_tokens = branch.conversation.transcript.num_model_tokens
        turn = BranchTurn(len(history), generation.tokens[-1], num_model_tokens, text.wording)
        number = self._branches.add_turn(branch, history, turn, text.unit_with_stop)
        version = generation.version_spans[-1][2]
        return TurnReply(secrets.token_hex(12), int(time.time()), text, num_before, version, branch, number)

    def mark_sent(self, reply: TurnReply) -> None:
        """Record that the agent got a turn."""
        self._branches.mark_sent(reply.branch, reply.number)

    async def _generate(self, request: TurnRequest, place: Place) -> tuple[int, Generation]:
        """Return (tokens before the turn, the turn). The branch has its conversation afterwards."""
        branch = place.branch
        if self.settings.trained_conversation == "only" and len(self._branches.branches) > 1:
            problem = "does not continue this session's conversation, and agents.trained_conversation = only"
            raise Refusal(400, f"the request {problem}: send earlier turns as they were answered", "messages")
        last = branch.turns[-1] if branch.turns else None
        ending = request.history[-1]
        is_begun = place.new_from < len(request.messages) and ending[0] == "assistant"
        if is_begun and (last is not None or self._branches.has_turn(ending)):
            problem = "the messages end with an assistant's message that is not this conversation's last turn"
            raise Refusal(400, f"{problem}: the policy cannot continue it. End with a user's or a tool's", "messages")
        written_ids = dict(self._written_ids)
        tokens = await self._rendering.run(self._rendering.tokens, request, place.new_from, last, written_ids)
        try:
            conversation = self._conversation(place, tokens)
            num_before = len(conversation.transcript)
            generation = await conversation.next_turn(request.stops, request.max_tokens)
        except NeighbourError as error:
            if error.boundary == "prompt":
                raise Refusal(400, error.detail, "messages") from None
            self.fail(error)
            raise
        branch.conversation, branch.is_out_of_room = conversation, False
        return num_before, generation

    def _conversation(self, place: Place, tokens: list[int]) -> Conversation:
        """Return the request's conversation with its new tokens. Raises: Refusal when no turn has room after them."""
        number = place.branch.number
        conversation = place.branch.conversation
        if place.source is not None:
            kept = place.source.transcript.up_to(place.num_turns)
            conversation = self._conversations.take_up(self.sample, kept, self._written, number)
        if conversation is None:
            if len(tokens) < self._conversations.settings.max_context_tokens:
                return self._conversations.begin(self.sample, tokens, self._written, number)
        elif conversation.observe(tokens):
            return conversation
        place.branch.is_out_of_room = True
        # Clients recognise a full context by these words of vLLM's, and end the conversation in order.
        limit = self._conversations.settings.max_context_tokens
        problem = f"This model's maximum context length is {limit} tokens (rollout.max_context_tokens)"
        raise Refusal(
            400, f"{problem}: the request leaves no room for an answer", "messages", "context_length_exceeded"
        )

    def _result(self, reward: RewardBody | None) -> AgentResult:
        branch = self._branches.branch_to_train(self.settings.trained_conversation)
        if branch is None or branch.conversation is None:
            raise NeighbourError(AGENT, "ended without a turn of the policy: no request with its key was answered")
        conversation = branch.conversation
        # The agent never got later turns: its reward does not apply to them.
        transcript = conversation.transcript = conversation.transcript.up_to(branch.num_sent_turns)
        transcript.started_at = self._opened_at
        transcript.environment_s = max(0.0, time.time() - self._opened_at - transcript.generate_s)
        num_dropped = sum(each.num_answers > 0 for each in self._branches.branches) - 1
        if reward is not None:
            transcript.add_reward(reward.reward)
            transcript.add_figures(reward.score, reward.logs)
        if num_dropped:
            transcript.add_figures(None, {"dropped_conversations": float(num_dropped)})
        if self._branches.num_changed:
            transcript.add_figures(None, {"changed_turns": float(self._branches.num_changed)})
        finish: Finish = transcript.turns[-1].finish
        if branch.is_out_of_room or (finish == "length" and conversation.is_full):
            finish = "context"
        return AgentResult(conversation, finish, num_dropped)

    def _close(self, outcome: AgentResult | NeighbourError | None) -> None:
        if self._watch is not None:
            self._watch.cancel()
        self.retries.cancel()
        if self.result.done():
            return
        if isinstance(outcome, NeighbourError):
            self.result.set_exception(outcome)
        elif outcome is not None:
            self.result.set_result(outcome)

    def _watch_idle(self, in_s: float) -> None:
        self._watch = asyncio.get_running_loop().call_later(in_s, self._check_idle)

    def _check_idle(self) -> None:
        """Fail the sample after agents.idle_timeout_s without a request; otherwise check again."""
        limit_s = self.settings.idle_timeout_s
        left_s = self._active_at + limit_s - time.monotonic()
        if self.retries.num_in_progress:
            left_s = limit_s
        if left_s > 0.0:
            self._watch_idle(left_s)
            return
        self.fail(NeighbourError(AGENT, f"asked nothing for agents.idle_timeout_s = {limit_s:g} s"))
