"""One sample's conversations in the engine's event loop, asked for from the endpoint's.

Tokens of conversations are touched in this loop alone. What has to be matched, rendered or encoded is done elsewhere.
"""

import asyncio
from dataclasses import dataclass, field

from protocol.errors import NeighbourError
from rollout.engine.generation import Generation
from rollout.episodes.conversation import Conversation, Conversations
from rollout.episodes.sample import SampleTask, WrittenSoFar


@dataclass(frozen=True)
class TurnAsked:
    """A turn that the policy is to write."""

    number: int  # of the conversation among the sample's
    tokens: list[int]  # what comes before it: a prompt, or what was said since the last turn
    own: Conversation | None  # goes on; None: it is begun
    parted_from: Conversation | None = None  # the first num_turns turns of this one are taken over
    num_turns: int = 0  # turns of the policy that are kept
    stop: tuple[str, ...] = ()  # strings that end the turn
    max_tokens: int | None = None  # most tokens to write; None: as rollout.* says


@dataclass(frozen=True)
class Written:
    """A turn that the policy wrote."""

    conversation: Conversation  # with it
    generation: Generation  # the turn
    num_before: int  # tokens of the conversation before it
    num_model_tokens: int  # written by the policy in this conversation so far


class NoRoom(Exception):
    """What is said leaves no room for a token in rollout.max_context_tokens."""


@dataclass(frozen=True)
class Ended:
    """How a sample's agent has ended."""

    trained: Conversation | None = None  # the one to train; None: the agent was sent no turn of the policy
    num_turns: int = 0  # of it that the agent was sent
    reward: float | None = None  # that the agent gave; None: it gave none
    score: float | None = None  # the agent's own, for filtering
    logs: dict[str, float] = field(default_factory=dict)  # the agent's numbers
    num_dropped: int = 0  # conversations that are not trained
    is_out_of_room: bool = False  # True: the agent said more than the context holds
    error: NeighbourError | None = None  # what failed the sample; None: nothing did


class SampleTurns:
    """Made in the engine's event loop; `ended` is its future."""

    def __init__(self, conversations: Conversations, sample: SampleTask, written: WrittenSoFar) -> None:
        self.sample = sample
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[Ended] = self._loop.create_future()
        self._conversations = conversations
        self._written = written

    async def ask(self, turn: TurnAsked) -> Written:
        """Return what the policy writes; called in another event loop. Cancelling aborts it in the engine.

        Raises: NoRoom, or NeighbourError naming "engine" or "prompt".
        """
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._write(turn), self._loop))

    def end(self, how: Ended) -> None:
        """Tell how the agent has ended, from any thread; the first one counts."""
        self._loop.call_soon_threadsafe(self._end, how)

    def _end(self, how: Ended) -> None:
        if not self.ended.done():
            self.ended.set_result(how)

    async def _write(self, turn: TurnAsked) -> Written:
        conversation = self._begun(turn)
        num_before = len(conversation.transcript)
        generation = await conversation.next_turn(turn.stop, turn.max_tokens)
        return Written(conversation, generation, num_before, conversation.transcript.num_model_tokens)

    def _begun(self, turn: TurnAsked) -> Conversation:
        """Return the conversation with everything said before the turn."""
        if turn.own is None and turn.parted_from is None:
            limit = self._conversations.settings.max_context_tokens
            if len(turn.tokens) >= limit:
                raise NoRoom
            return self._conversations.begin(self.sample, turn.tokens, self._written, turn.number)
        conversation = turn.own
        if turn.parted_from is not None:
            kept = turn.parted_from.transcript.up_to(turn.num_turns)
            conversation = self._conversations.take_up(self.sample, kept, self._written, turn.number)
        assert conversation is not None
        if not conversation.observe(turn.tokens):
            raise NoRoom
        return conversation
