"""POST /v1/chat/completions: the request, and its answer, whole or as a stream of the finished turn."""

import json
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field

from protocol.http.bodies import read_request
from rollout.endpoint.messages import read_messages
from rollout.endpoint.requests import SessionSampling, TurnBody, check_others, check_tool, may_call
from rollout.endpoint.turns import TurnReply, TurnRequest, TurnText

_MAX_STOPS = 64
_Stop = Annotated[str, Field(min_length=1, max_length=200)]
_Stops = Annotated[list[_Stop], Field(max_length=_MAX_STOPS)]


class ChatBody(TurnBody):
    """The request. `check_others` checks all other fields."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=10_000)]
    stop: _Stop | _Stops | None = None  # strings that end the turn; the reply leaves them out
    max_tokens: Annotated[int, Field(gt=0)] | None = None  # most tokens of the turn
    max_completion_tokens: Annotated[int, Field(gt=0)] | None = None  # newer name of max_tokens


def read_chat(raw: bytes, sampling: SessionSampling) -> tuple[ChatBody, TurnRequest]:
    """Return a request. Raises: Refusal, BodyError."""
    body = read_request(ChatBody, raw)
    check_others(body, sampling)
    tools = body.tools or []
    for place, tool in enumerate(tools):
        check_tool(tool, tool.get("function"), f"tools[{place}]")
    request = TurnRequest(
        messages=read_messages(body.messages),
        tools=tools,
        template_kwargs=body.chat_template_kwargs or {},
        may_call=may_call(body.tool_choice, tools),
        stops=tuple([body.stop] if isinstance(body.stop, str) else body.stop or ()),
        max_tokens=body.max_completion_tokens or body.max_tokens,
    )
    return body, request


def answer_chat(reply: TurnReply, body: ChatBody) -> bytes:
    """Return the answer: JSON, or events if the request asks for a stream."""
    if not body.stream:
        return json.dumps(_completion(reply, body)).encode()
    chunks = b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in _chunks(reply, body))
    return chunks + b"data: [DONE]\n\n"


def _completion(reply: TurnReply, body: ChatBody) -> dict[str, Any]:
    text = reply.text
    message: dict[str, Any] = {"role": "assistant", "content": _content(text)}
    if text.calls:
        message["tool_calls"] = [each.in_chat for each in text.calls]
    choice = {"index": 0, "message": message, "finish_reason": text.finish, "logprobs": None}
    return {**_head(reply, body, "chat.completion"), "choices": [choice], "usage": _usage(reply)}


def _chunks(reply: TurnReply, body: ChatBody) -> Iterator[dict[str, Any]]:
    """Yield the turn, its end, and the usage if the request asks for it."""
    text, head = reply.text, _head(reply, body, "chat.completion.chunk")
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": _content(text)}]
    if text.calls:
        calls = [{"index": place, **each.in_chat} for place, each in enumerate(text.calls)]
        if text.content:  # AutoGen reads no calls from a piece that has a text
            deltas.append({})
        deltas[-1]["tool_calls"] = calls
    for delta, finish in [*((delta, None) for delta in deltas), ({}, text.finish)]:
        yield {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}]}
    if (body.stream_options or {}).get("include_usage"):
        yield {**head, "choices": [], "usage": _usage(reply)}


def _head(reply: TurnReply, body: ChatBody, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{reply.id}",
        "object": kind,
        "created": reply.created,
        "model": body.model or "policy",
        "system_fingerprint": f"version-{reply.policy_version}",
    }


def _usage(reply: TurnReply) -> dict[str, int]:
    before, written = reply.num_prompt_tokens, reply.text.num_tokens
    return {"prompt_tokens": before, "completion_tokens": written, "total_tokens": before + written}


def _content(text: TurnText) -> str | None:
    return text.content or (None if text.calls else "")
