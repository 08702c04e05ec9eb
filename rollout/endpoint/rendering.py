"""Text and tokens for agents, in a thread of its own: the event loop never waits for a tokenizer or for JSON."""

import asyncio
import copy
import itertools
import json
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from protocol.errors import NeighbourError, SettingsError
from protocol.http.bodies import read_request
from rollout.endpoint.branches import BranchTurn, Unit
from rollout.endpoint.messages import Message, own_turn, read_messages
from rollout.endpoint.requests import ChatBody, Refusal, SessionSampling, check_others, check_tool_choice
from rollout.engine.generation import Generation
from rollout.environments.base import Chat
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
    stop: str  # stop string that ended the turn, as far as its tokens have it; "": none
    num_tokens: int  # sampled tokens

    @property
    def unit(self) -> Unit:
        """The turn in comparable form."""
        return own_turn(self.content, [(call.name, call.arguments) for call in self.calls])

    @property
    def unit_with_stop(self) -> Unit | None:
        """The turn with its stop string put back by the agent, in comparable form; None: the same."""
        return own_turn(self.content + self.stop, []) if self.stop and not self.calls else None


@dataclass(frozen=True)
class TurnRequest:
    """A request for a turn, read and checked."""

    messages: list[Message]  # whole history
    tools: list[dict[str, Any]]  # tools for the chat template
    may_call: bool  # True: the turn's calls are read
    body: ChatBody  # fields of the request

    @property
    def kind(self) -> Hashable:
        """Kind of the request: it continues conversations of its own kind only."""
        return json.dumps(self.tools, sort_keys=True)

    @property
    def history(self) -> list[Unit]:
        """The history in comparable form."""
        return [message.same_as for message in self.messages]


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
        if may_call and self._calls is None:
            problem = "the model's calls of tools cannot be read. Set tools.call_format"
            raise Refusal(400, problem, "tools", "unsupported_value")
        return TurnRequest(read_messages(body.messages), body.tools or [], may_call, body)

    def tokens(self, request: TurnRequest, new_from: int, last: BranchTurn | None) -> list[int]:
        """Return the tokens of the messages from `new_from` on.

        last: the policy's turn before them; None: they are a prompt. Raises: Refusal when the template or the tokenizer
        cannot take them.
        """
        new = [message.rendered for message in request.messages[new_from:]]
        try:
            if last is None:
                return self._chat.prompt(Chat(new, request.tools))
            return self._chat.reply(new, request.tools, last.last_token, _UNCUT)[0]
        except NeighbourError as error:
            raise Refusal(400, error.detail, "messages") from None

    def texts(self, transcript: Transcript) -> list[str]:
        """Return the texts of prompt and response, names of control tokens kept."""
        parts = (transcript.prompt_tokens, transcript.response_tokens)
        return [str(self._tokenizer.decode(part, skip_special_tokens=False)) for part in parts]

    def read_turn(self, generation: Generation, request: TurnRequest) -> TurnText:
        """Return a turn as the agent reads it."""
        content, stop = self._split_stop(generation)
        calls: list[AgentCall] = []
        if request.may_call and self._calls is not None:
            before, written = self._calls.read(content)
            # A turn with a call that cannot be read stays text: the agent decides.
            if written and not any(call.problem for call in written):
                content = before
                calls = [AgentCall(self._call_id(), call.name, json.dumps(dict(call.arguments))) for call in written]
        finish: Literal["stop", "length", "tool_calls"] = "tool_calls" if calls else "stop"
        if generation.finish_reason == "length":
            finish = "length"
        return TurnText(content, calls, finish, stop, len(generation.tokens))

    def _call_id(self) -> str:
        return f"call{next(self._numbers) % 100_000:05d}"

    def _split_stop(self, generation: Generation) -> tuple[str, str]:
        """Return a turn's text without its end, and the stop string that ended it."""
        text, stop = generation.text, generation.stop_string
        if stop is None:
            return text.removesuffix(self._control.get(generation.tokens[-1], "")), ""
        return text[: text.rfind(stop)], stop
