"""Text and tokens for agents, in a thread of its own: the event loop never waits for a tokenizer or for JSON."""

import asyncio
import copy
import itertools
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from protocol.errors import NeighbourError, SettingsError
from protocol.http.bodies import read_request
from rollout.endpoint.branches import BranchTurn
from rollout.endpoint.requests import (
    ChatBody,
    Message,
    Refusal,
    SessionSampling,
    TextBody,
    TurnBody,
    check_others,
    check_tool_choice,
    own_turn,
    read_messages,
    single_prompt,
)
from rollout.engine.generation import Generation
from rollout.environments.base import Chat, Observation
from rollout.environments.tool_use.call_formats import choose_reader
from rollout.episodes.chat_tokens import ChatTokens
from rollout.episodes.control_names import control_tokens
from rollout.episodes.transcript import Transcript

_T = TypeVar("_T")
# Agents' texts are never cut: a text that does not fit is refused.
_UNCUT = 1 << 62


@dataclass(frozen=True)
class AgentCall:
    """A call of a tool, which the agent runs."""

    id: str  # id of 9 characters, as some chat templates require
    name: str  # tool's name
    arguments: str  # JSON object


@dataclass(frozen=True)
class TurnText:
    """A turn of the policy as the agent reads it."""

    content: str  # text without calls, without a stop string, without the token that ended it
    calls: list[AgentCall]  # calls in order
    finish: Literal["stop", "length", "tool_calls"]  # OpenAI's finish_reason
    endings: tuple[str, ...]  # forms of the text after content that the turn's tokens have
    ids: list[int]  # sampled tokens
    logprobs: list[tuple[str, float]]  # (text, natural log of the probability) of each token; empty: not requested


@dataclass(frozen=True)
class AskedChat:
    """History of chat messages."""

    messages: list[Message]  # whole history
    tools: list[dict[str, Any]]  # tools for the chat template
    may_call: bool  # True: the turn's calls are read

    @property
    def kind(self) -> Any:
        """Kind of the request: it continues conversations of its own kind only."""
        return ("chat", json.dumps(self.tools, sort_keys=True))

    @property
    def history(self) -> Sequence[Any]:
        """The history in comparable units."""
        return [message.same_as for message in self.messages]

    def with_turn(self, turn: TurnText) -> Sequence[Any]:
        """Return the history with this turn at its end."""
        return [*self.history, own_turn(turn.content, [(call.name, call.arguments) for call in turn.calls])]

    def with_stop(self, turn: TurnText) -> Any | None:
        """Return the turn's unit with its stop string put back by the agent; None: the same unit."""
        return own_turn(turn.content + turn.endings[-1], []) if turn.endings and not turn.calls else None

    def endings(self, turn: TurnText) -> tuple[str, ...]:
        """Return the texts that `with_turn` leaves out and a continuation may include. The template ends turns."""
        return ()

    def tokens(self, chat: ChatTokens, new_from: int, last: BranchTurn | None) -> list[int]:
        """Return the tokens of `history[new_from:]`. last: the policy's turn before them; None: they are a prompt."""
        new = [message.rendered for message in self.messages[new_from:]]
        if last is None:
            return chat.prompt(Chat(new, self.tools))
        return chat.reply(new, self.tools, last.last_token, _UNCUT)[0]


@dataclass(frozen=True)
class AskedText:
    """History as text with the names of control tokens: the agent writes the model's format itself."""

    history: str  # whole history
    kind: Any = "text"
    may_call: bool = False

    def with_turn(self, turn: TurnText) -> str:
        return self.history + turn.content

    def with_stop(self, turn: TurnText) -> None:
        return None

    def endings(self, turn: TurnText) -> tuple[str, ...]:
        return turn.endings

    def tokens(self, chat: ChatTokens, new_from: int, last: BranchTurn | None) -> list[int]:
        new = self.history[new_from:]
        if last is None:
            return chat.prompt(new)
        # The agent may write the turn's end, which the policy sampled and the reply left out.
        ending = next((each for each in last.endings if new.startswith(each)), "")
        return chat.observation(Observation("", head=new.removeprefix(ending)), _UNCUT)[0]


@dataclass(frozen=True)
class AskedTokens:
    """History as token ids."""

    history: list[int]  # whole history
    kind: Any = "tokens"
    may_call: bool = False

    def with_turn(self, turn: TurnText) -> Sequence[int]:
        return [*self.history, *turn.ids]

    def with_stop(self, turn: TurnText) -> None:
        return None

    def endings(self, turn: TurnText) -> tuple[str, ...]:
        return ()

    def tokens(self, chat: ChatTokens, new_from: int, last: BranchTurn | None) -> list[int]:
        return self.history[new_from:]


Asked = AskedChat | AskedText | AskedTokens


@dataclass(frozen=True)
class TurnRequest:
    """A request for a turn, read and checked."""

    asked: Asked  # history
    body: TurnBody  # fields of the request
    max_tokens: int | None  # most tokens of the turn; None: rollout.max_response_tokens
    has_logprobs: bool  # True: the reply has each token's logprob


class Rendering:
    """Texts of one model. Call its methods by `run`: two threads must not use a tokenizer at once."""

    def __init__(self, tokenizer: Any, call_format: str) -> None:
        """tokenizer: the engine's; a copy is used. call_format: tools.call_format."""
        # Encoding changes flags inside a tokenizer, and the engine's is used in another thread.
        self._tokenizer = own = copy.deepcopy(tokenizer)
        self._calls = None
        with suppress(SettingsError):  # agents without tools run with any model
            self._calls = choose_reader(call_format, own)
        self._chat = ChatTokens(own)
        self._control = control_tokens(own)
        self._numbers = itertools.count()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="agents-text")

    async def run(self, work: Callable[..., _T], *arguments: Any) -> _T:
        """Return work(*arguments), called in the thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def read_chat(self, raw: bytes, sampling: SessionSampling) -> TurnRequest:
        """Return a request for a chat completion. Raises: Refusal, BodyError."""
        body = read_request(ChatBody, raw)
        check_others(body, sampling)
        may_call = check_tool_choice(body.tool_choice) and bool(body.tools)
        if getattr(self._tokenizer, "chat_template", None) is None:
            raise Refusal(400, "the model has no chat template: use /v1/completions", "messages")
        if may_call and self._calls is None:
            problem = "the model's calls of tools cannot be read. Set tools.call_format"
            raise Refusal(400, problem, "tools", "unsupported_value")
        asked = AskedChat(read_messages(body.messages), body.tools or [], may_call)
        return TurnRequest(asked, body, body.max_completion_tokens or body.max_tokens, bool(body.logprobs))

    def read_text(self, raw: bytes, sampling: SessionSampling) -> TurnRequest:
        """Return a request for a completion. Raises: Refusal, BodyError."""
        body = read_request(TextBody, raw)
        check_others(body, sampling)
        prompt, vocabulary = single_prompt(body.prompt), len(self._tokenizer)
        if not isinstance(prompt, str) and any(not 0 <= token < vocabulary for token in prompt):
            raise Refusal(400, f"prompt holds a token that is not between 0 and {vocabulary - 1}", "prompt")
        if body.logprobs not in (None, False, True, 0):
            problem = f"logprobs = {body.logprobs}: only the sampled tokens' are known. Use 0"
            raise Refusal(400, problem, "logprobs")
        asked: Asked = AskedText(prompt) if isinstance(prompt, str) else AskedTokens(prompt)
        has_logprobs = body.logprobs is not None and body.logprobs is not False
        return TurnRequest(asked, body, body.max_tokens, has_logprobs)

    def tokens(self, asked: Asked, new_from: int, last: BranchTurn | None) -> list[int]:
        """Return the tokens of a request's new part. Raises: Refusal when template or tokenizer cannot take it."""
        try:
            return asked.tokens(self._chat, new_from, last)
        except NeighbourError as error:
            raise Refusal(400, error.detail, "messages") from None

    def texts(self, transcript: Transcript) -> list[str]:
        """Return the texts of prompt and response, names of control tokens kept."""
        parts = (transcript.prompt_tokens, transcript.response_tokens)
        return [str(self._tokenizer.decode(part, skip_special_tokens=False)) for part in parts]

    def read_turn(self, generation: Generation, request: TurnRequest) -> TurnText:
        """Return a turn as the agent reads it."""
        content, endings = self._split_ending(generation)
        calls: list[AgentCall] = []
        if request.asked.may_call and self._calls is not None:
            before, found = self._calls.read(content)
            # A turn with a call that cannot be read stays text: the agent decides.
            if found and not any(call.problem for call in found):
                content = before
                calls = [AgentCall(self._call_id(), call.name, json.dumps(dict(call.arguments))) for call in found]
        finish: Literal["stop", "length", "tool_calls"] = "tool_calls" if calls else "stop"
        if generation.finish_reason == "length":
            finish = "length"
        logprobs: list[tuple[str, float]] = []
        if request.has_logprobs:
            names = [self._tokenizer.decode([token]) for token in generation.tokens]
            logprobs = list(zip(names, generation.logprobs, strict=True))
        return TurnText(content, calls, finish, endings, list(generation.tokens), logprobs)

    def _call_id(self) -> str:
        return f"call{next(self._numbers) % 100_000:05d}"

    def _split_ending(self, generation: Generation) -> tuple[str, tuple[str, ...]]:
        """Return a turn's text without its ending, and the ending in the forms that a continuation may have."""
        text, stop = generation.text, generation.stop_string
        if stop is not None:
            begin = text.rfind(stop)
            # A stop string may end inside a token.
            return text[:begin], tuple(dict.fromkeys((text[begin:], stop)))
        name = self._control.get(generation.tokens[-1], "")
        return (text.removesuffix(name), (name,)) if name else (text, ())
