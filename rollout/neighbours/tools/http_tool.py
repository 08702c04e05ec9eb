"""A user's tool behind a URL: a call's arguments are posted as JSON, and the policy reads the reply.

200  {"result": ..}        the result; other values than text as JSON
200  {"error": ".."}       a refusal: the policy reads "Error: .."; only without a result, or with result null
200  any other text        that text
400, 422                   a refusal, with the reply's error, detail or message, or all of it
any other reply, or none   retried like a reward service, then the sample fails
"""

import asyncio
import json
import uuid
from collections.abc import Mapping
from typing import Any

from protocol.errors import NeighbourError
from protocol.http.bodies import BodyError
from protocol.settings.tools import HttpTool
from rollout.environments.base import ToolRefusal
from rollout.environments.timed_calls import timed_call
from rollout.environments.tool_use.arguments import check_json
from rollout.neighbours.http.endpoint import HttpEndpoint, HttpPolicy
from rollout.neighbours.http.failures import AttemptFailed
from rollout.neighbours.http.pool import headers_from_environment

_REFUSED = (400, 422)
_REASONS = ("error", "detail", "message")
_MIN_OVERALL_S = 180.0


class HttpToolClient:
    """Client of one tool, in one event loop. Raises: OperatorError for an unset variable of a header."""

    def __init__(self, tool: HttpTool) -> None:
        self._name = tool.name
        self._boundary = f"tool:{tool.name}"
        self._check = tool.check
        self._policy = HttpPolicy(
            attempt_timeout_s=tool.timeout_s, overall_timeout_s=max(_MIN_OVERALL_S, 3 * tool.timeout_s)
        )
        headers = headers_from_environment(tool.headers_env, f"tools.http {tool.name}")
        self._http = HttpEndpoint(str(tool.url), headers, self._policy, tool.max_concurrency)
        self._address = (str(tool.url.host).strip("[]"), tool.url.port)
        function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
        self.schema: dict[str, Any] = {"type": "function", "function": function}

    @property
    def is_accepting(self) -> bool:
        return not self._http.breaker.is_open

    async def __call__(self, **arguments: Any) -> str:
        return await self.answer(arguments)

    async def answer(self, arguments: Mapping[str, Any]) -> str:
        """Return the text that the policy reads. Raises: ToolRefusal, NeighbourError."""
        check_json(arguments)
        body = json.dumps(arguments).encode()
        # One key for all attempts of a call: a tool with effects can recognise a call that it has done.
        key = str(uuid.uuid4())
        try:
            with timed_call("tool", self._name):
                answer = await self._http.call(self._boundary, body, _read, key)
        except NeighbourError as error:
            cause = error.__cause__
            if isinstance(cause, AttemptFailed) and cause.status in _REFUSED:
                raise ToolRefusal(_reason_in(cause.text)) from None
            raise
        if isinstance(answer, ToolRefusal):
            raise answer
        return answer

    async def check(self) -> None:
        """Make the call of the setting `check`; without one, connect to the address.

        Raises: NeighbourError with the remedy.
        """
        advice = f"Start the tool, or change tools.http (name {self._name})."
        try:
            if self._check is not None:
                answered = await self._http.attempt(json.dumps(self._check).encode(), _read, str(uuid.uuid4()))
                if isinstance(answered, ToolRefusal):
                    raise NeighbourError(self._boundary, f"its first call was refused: {answered}. {advice}")
                return
            async with asyncio.timeout(self._policy.connect_timeout_s):
                _, writer = await asyncio.open_connection(*self._address)
            writer.close()
        except AttemptFailed as failure:
            raise NeighbourError(self._boundary, f"{failure}. {advice}") from failure
        except (OSError, TimeoutError) as error:
            raise NeighbourError(self._boundary, f"{self._http.url}: no connection ({error}). {advice}") from error

    async def close(self) -> None:
        await self._http.close()


def _read(reply: bytes) -> str | ToolRefusal:
    """Return a reply's text or its refusal. Raises: BodyError for a reply that is not text."""
    try:
        text = reply.decode("utf-8-sig")  # some servers begin JSON with a byte order mark
    except UnicodeDecodeError:
        raise BodyError("$", "is not text in UTF-8") from None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if not isinstance(value, dict) or not ("result" in value or "error" in value):
        return text
    result, error = value.get("result"), value.get("error")
    if error and result is None:
        return ToolRefusal(_text_of(error))
    return _text_of(result) if "result" in value else text


def _reason_in(text: str) -> str:
    """Return the reason of a refusal, from the beginning of an error page."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if not isinstance(value, dict):
        return text
    return next((_text_of(value[name]) for name in _REASONS if value.get(name) is not None), text)


def _text_of(value: Any) -> str:
    """Return a value as text. Half of a character, as of an emoji that a tool cut in two, becomes a question mark."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text.encode(errors="replace").decode()
