"""Text and tokens for agents, in a thread of its own: no event loop waits for a tokenizer."""

import asyncio
import copy
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from protocol.errors import NeighbourError, SettingsError
from rollout.endpoint.branches import SaidTurn
from rollout.endpoint.messages import Message, own_turn
from rollout.endpoint.refusals import Refused
from rollout.endpoint.turn_text import TurnReader, TurnText
from rollout.engine.generation import Generation
from rollout.environments.base import Chat, Observation
from rollout.environments.tool_use.tool_use import chosen_format
from rollout.episodes.chat_tokens import ChatTokens
from rollout.episodes.control_names import control_tokens
from rollout.episodes.text_codec import TextCodec
from rollout.episodes.transcript import Transcript

_T = TypeVar("_T")
# Nothing that an agent says is cut: what does not fit is refused.
_UNCUT = 1 << 62


class Asked(Protocol):
    """What a request says, in one of three forms."""

    @property
    def kind(self) -> Any:
        """Requests of one kind alone go on with each other."""

    @property
    def said(self) -> Sequence[Any]:
        """All that it says, in the units by which histories are compared."""

    @property
    def may_call(self) -> bool:
        """Whether calls of tools are looked for in the answer."""

    def with_turn(self, turn: TurnText) -> Sequence[Any]:
        """Return what is said once it was answered by this turn."""

    def with_stop(self, turn: TurnText) -> Any | None:
        """Return the turn as an agent says it that puts its stop string back, a unit of `said`; None: as it is."""

    def endings(self, turn: TurnText) -> tuple[str, ...]:
        """Return what `with_turn` leaves out of a turn and a request that goes on may say, as in `SaidTurn`."""

    def tokens(self, to: "Texts", new_from: int, last: SaidTurn | None) -> list[int]:
        """Return the tokens of `said[new_from:]`. last: the policy's turn before them; None: there is nothing."""


@dataclass(frozen=True)
class Texts:
    """What a form needs to become tokens."""

    chat: ChatTokens  # of the model
    reader: TurnReader  # of the model
    has_template: bool  # False: the model has no chat template


@dataclass(frozen=True)
class AskedChat:
    """Chat messages."""

    messages: list[Message]  # all of them
    tools: list[dict[str, Any]]  # that the model is told of
    may_call: bool

    @property
    def kind(self) -> Any:
        return ("chat", json.dumps(self.tools, sort_keys=True))

    @property
    def said(self) -> Sequence[Any]:
        return [message.same_as for message in self.messages]

    def with_turn(self, turn: TurnText) -> Sequence[Any]:
        return [*self.said, own_turn(turn.content, [(call.name, call.arguments) for call in turn.calls])]

    def with_stop(self, turn: TurnText) -> Any | None:
        return own_turn(turn.content + turn.endings[-1], []) if turn.endings and not turn.calls else None

    def endings(self, turn: TurnText) -> tuple[str, ...]:
        return ()  # the template ends turns

    def tokens(self, to: Texts, new_from: int, last: SaidTurn | None) -> list[int]:
        if not to.has_template:
            raise Refused(400, "the model has no chat template: ask for /v1/completions", "messages")
        new = [message.rendered for message in self.messages[new_from:]]
        if last is None:
            return to.chat.prompt(Chat(new, self.tools))
        return to.chat.reply(new, self.tools, last.last_token, _UNCUT)[0]


@dataclass(frozen=True)
class AskedText:
    """A text, with control tokens as their names: the agent writes the model's own form itself."""

    text: str  # all of it
    kind: Any = "text"
    may_call: bool = False

    @property
    def said(self) -> str:
        return self.text

    def with_turn(self, turn: TurnText) -> str:
        return self.text + turn.content

    def with_stop(self, turn: TurnText) -> None:
        return None

    def endings(self, turn: TurnText) -> tuple[str, ...]:
        return turn.endings

    def tokens(self, to: Texts, new_from: int, last: SaidTurn | None) -> list[int]:
        new = self.text[new_from:]
        if last is None:
            return to.chat.prompt(new)
        # The agent writes the end of the turn too, which the policy has sampled and the reply left out.
        ending = next((each for each in last.endings if new.startswith(each)), "")
        return to.chat.observation(Observation("", head=new.removeprefix(ending)), _UNCUT)[0]


@dataclass(frozen=True)
class AskedTokens:
    """Tokens. The reply's token ids are what is compared with."""

    ids: list[int]  # all of them
    vocabulary: int  # number of tokens that the model knows
    kind: Any = "tokens"
    may_call: bool = False

    @property
    def said(self) -> Sequence[int]:
        return self.ids

    def with_turn(self, turn: TurnText) -> Sequence[int]:
        return [*self.ids, *turn.ids]

    def with_stop(self, turn: TurnText) -> None:
        return None

    def endings(self, turn: TurnText) -> tuple[str, ...]:
        return ()  # nothing is left out

    def tokens(self, to: Texts, new_from: int, last: SaidTurn | None) -> list[int]:
        if any(not 0 <= token < self.vocabulary for token in self.ids):
            raise Refused(400, f"prompt holds a token that is not between 0 and {self.vocabulary - 1}", "prompt")
        return self.ids[new_from:]


class Rendering:
    """Of one model. One thread: a tokenizer is not to be used by two at once."""

    def __init__(self, tokenizer: Any, call_format: str) -> None:
        """tokenizer: the engine's, which is left alone. call_format: tools.call_format."""
        # Encoding changes flags inside a tokenizer: the engine's is used in another thread.
        own = copy.deepcopy(tokenizer)
        template = getattr(own, "chat_template", None)
        chosen = None
        with suppress(SettingsError):  # no chat template, or one that writes no calls: agents without tools still run
            chosen = chosen_format(call_format, template)
        self._codec = TextCodec(own)
        self._texts = Texts(ChatTokens(own), TurnReader(own, control_tokens(own), chosen), template is not None)
        self.vocabulary = len(own)  # number of tokens that the tokenizer knows
        self.can_call = chosen is not None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="agents-text")

    async def tokens(self, asked: Asked, new_from: int, last: SaidTurn | None) -> list[int]:
        """Return the tokens of what is new in a request.

        Raises: Refused when template or tokenizer cannot take it.
        """
        return await self._in_thread(lambda: _refusing(lambda: asked.tokens(self._texts, new_from, last)))

    async def read(self, generation: Generation, may_call: bool, has_logprobs: bool) -> TurnText:
        """Return a turn as the agent reads it."""
        return await self._in_thread(lambda: self._texts.reader.read(generation, may_call, has_logprobs))

    async def texts(self, transcript: Transcript) -> tuple[str, str]:
        """Return the texts of a conversation's prompt and of all behind it, names of control tokens kept."""
        parts = (transcript.prompt_tokens, transcript.response_tokens)
        prompt, response = await self._in_thread(lambda: self._codec.decode(*parts))
        return prompt, response

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _refusing(work: Callable[[], _T]) -> _T:
    try:
        return work()
    except NeighbourError as error:
        raise Refused(400, error.detail, "messages") from None
