"""Text and tokens for agents, in a thread of its own: the event loop never waits for a tokenizer or for JSON."""

import asyncio
import copy
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Literal, TypeVar

from protocol.errors import NeighbourError, SettingsError
from rollout.endpoint.branches import BranchTurn
from rollout.endpoint.requests import Refusal
from rollout.endpoint.turns import AgentCall, TurnRequest, TurnText, call_id
from rollout.engine.generation import Generation
from rollout.environments.base import Chat, ToolRefusal
from rollout.environments.tool_use.arguments import fit_arguments
from rollout.environments.tool_use.call_formats import choose_reader, required_of
from rollout.episodes.chat_tokens import ChatTokens, control_tokens
from rollout.episodes.transcript import Transcript

_T = TypeVar("_T")
_Body = TypeVar("_Body")
_MAX_CHATS = 16  # kept renderers of requests with chat_template_kwargs
_MAX_NAMES = 10_000  # remembered names of tools
# Agents' texts are never cut: a text that does not fit is refused.
_UNCUT = 1 << 62


class Rendering:
    """Texts of one model. Call its methods by `run`: two threads must not use a tokenizer at once."""

    def __init__(
        self, tokenizer: Any, call_format: str, template_kwargs: Mapping[str, Any], ends: frozenset[int]
    ) -> None:
        """tokenizer: the engine's; a copy is used. call_format, template_kwargs: of the settings. ends: the engine's.

        Raises: SettingsError for variables that the chat template does not read.
        """
        # Encoding changes flags inside a tokenizer, and the engine's is used in another thread.
        self._tokenizer = own = copy.deepcopy(tokenizer)
        self._calls, self._unreadable = None, ""  # reader of calls; reason without one: agents without tools need none
        try:
            self._calls = choose_reader(call_format, own, template_kwargs, ends)
        except SettingsError as error:
            self._unreadable = str(error).removeprefix("settings: ")
        self._template_kwargs = dict(template_kwargs)
        self._ends = ends
        self._chat = ChatTokens(own, self._template_kwargs, ends)
        self._chats: dict[str, ChatTokens] = {}  # by a request's own variables
        # names of tools whose calls can be read, with their required arguments
        self._readable_names: set[tuple[str, ...]] = set()
        self._control = control_tokens(own, ends)
        self._numbers = itertools.count()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="agents-text")

    async def run(self, work: Callable[..., _T], *arguments: Any) -> _T:
        """Return work(*arguments), called in the thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def read(self, parse: Callable[..., tuple[_Body, TurnRequest]], *arguments: Any) -> tuple[_Body, TurnRequest]:
        """Return parse(*arguments): a request. Raises: Refusal, also for tools and variables without a use."""
        body, request = parse(*arguments)
        if request.may_call and self._calls is None:
            problem = f"this model cannot call tools here: {self._unreadable}"
            raise Refusal(400, problem, "tools", "unsupported_value")
        if request.may_call:
            self._check_names(request)
        try:
            self._chat_of(request)
        except SettingsError as error:
            raise Refusal(400, str(error), "chat_template_kwargs", "unsupported_value") from None
        return body, request

    def tokens(
        self, request: TurnRequest, new_from: int, last: BranchTurn | None, written_ids: Mapping[str, str]
    ) -> list[int]:
        """Return the tokens of the messages from `new_from` on.

        last: the policy's turn before them; None: they are a prompt. written_ids: as of `TurnRequest.as_rendered`.
        Raises: Refusal when the template or the tokenizer cannot take them.
        """
        new = request.as_rendered(new_from, written_ids)
        chat = self._chat_of(request)
        try:
            if last is None:
                return chat.prompt(Chat(new, request.tools))
            return chat.reply(new, request.tools, last.last_token, _UNCUT)[0]
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
                turn = next(self._numbers)
                calls = [
                    AgentCall(call_id(turn, n), each.name, _typed(each.arguments, each.name, request.tools), each.id)
                    for n, each in enumerate(written)
                ]
        finish: Literal["stop", "length", "tool_calls"] = "tool_calls" if calls else "stop"
        if generation.finish_reason == "length":
            finish = "length"
        return TurnText(content, calls, finish, stop, len(generation.tokens))

    def _check_names(self, request: TurnRequest) -> None:
        """Raise Refusal for a tool whose names make its calls unreadable."""
        for tool in request.tools:
            names = (tool["function"]["name"], *required_of(tool))
            if names not in self._readable_names and self._calls is not None:
                if (problem := self._calls.problem_of_tool(names[0], names[1:])) is not None:
                    raise Refusal(400, problem, "tools", "unsupported_value")
                if len(self._readable_names) >= _MAX_NAMES:
                    self._readable_names.clear()
                self._readable_names.add(names)

    def _chat_of(self, request: TurnRequest) -> ChatTokens:
        """Return the renderer with a request's variables. Raises: SettingsError for one that the template ignores."""
        if not request.template_kwargs:
            return self._chat
        key = json.dumps(request.template_kwargs, sort_keys=True)
        if key not in self._chats:
            variables = {**self._template_kwargs, **request.template_kwargs}
            self._chats[key] = ChatTokens(self._tokenizer, variables, self._ends)
            if len(self._chats) > _MAX_CHATS:
                del self._chats[next(iter(self._chats))]
        return self._chats[key]

    def _split_stop(self, generation: Generation) -> tuple[str, str]:
        """Return a turn's text without its end, and the stop string that ended it."""
        text, stop = generation.text, generation.stop_string
        if stop is None:
            return text.removesuffix(self._control.get(generation.tokens[-1], "")), ""
        return text[: text.rfind(stop)], stop


def _typed(arguments: Mapping[str, Any], name: str, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a call's arguments in the types of the request's tool; one that does not fit stays as the policy wrote it.

    Some models write every argument as text.
    """
    functions = [tool["function"] for tool in tools if isinstance(tool.get("function"), Mapping)]
    parameters = next((each.get("parameters") or {} for each in functions if each.get("name") == name), {})
    schema = {"function": {"parameters": {"properties": {}, **parameters, "required": []}}}
    typed = dict(arguments)
    for field, value in arguments.items():
        with suppress(ToolRefusal):
            typed |= fit_arguments({field: value}, schema)
    return typed
