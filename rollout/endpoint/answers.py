"""Answers in OpenAI's form: whole, or as server-sent events in which a turn is one piece."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rollout.endpoint.branches import Branch
from rollout.endpoint.rendering import AgentCall, TurnRequest, TurnText


@dataclass(frozen=True)
class TurnReply:
    """A turn of the policy, ready to be sent."""

    id: str  # id of the answer
    created: int  # Unix seconds
    text: TurnText  # turn as the agent reads it
    num_prompt_tokens: int  # tokens of the conversation before the turn
    policy_version: int  # version of its last token
    branch: Branch  # its branch
    number: int  # its number in the branch, from 1


def chat_completion(reply: TurnReply, request: TurnRequest) -> dict[str, Any]:
    """Return a chat completion."""
    text = reply.text
    message: dict[str, Any] = {"role": "assistant", "content": _content(text)}
    if text.calls:
        message["tool_calls"] = [_call(each) for each in text.calls]
    choice = {"index": 0, "message": message, "finish_reason": text.finish, "logprobs": None}
    return {**_head(reply, request, "chat.completion"), "choices": [choice], "usage": _usage(reply)}


def chat_chunks(reply: TurnReply, request: TurnRequest) -> Iterator[dict[str, Any]]:
    """Yield a chat completion in chunks: the turn, its end, and the usage if the request asks for it."""
    text, head = reply.text, _head(reply, request, "chat.completion.chunk")
    delta: dict[str, Any] = {"role": "assistant", "content": _content(text)}
    if text.calls:
        delta["tool_calls"] = [{"index": place, **_call(each)} for place, each in enumerate(text.calls)]
    turn = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": None}
    end = {"index": 0, "delta": {}, "finish_reason": text.finish, "logprobs": None}
    for choice in (turn, end):
        yield {**head, "choices": [choice]}
    if (request.body.stream_options or {}).get("include_usage"):
        yield {**head, "choices": [], "usage": _usage(reply)}


def events(chunks: Iterator[dict[str, Any]]) -> bytes:
    """Return a whole stream of server-sent events."""
    return b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"


def _head(reply: TurnReply, request: TurnRequest, kind: str) -> dict[str, Any]:
    fingerprint = f"version-{reply.policy_version}"
    model = request.body.model or "policy"
    return {"id": reply.id, "object": kind, "created": reply.created, "model": model, "system_fingerprint": fingerprint}


def _usage(reply: TurnReply) -> dict[str, int]:
    before, written = reply.num_prompt_tokens, reply.text.num_tokens
    return {"prompt_tokens": before, "completion_tokens": written, "total_tokens": before + written}


def _content(text: TurnText) -> str | None:
    return text.content or (None if text.calls else "")


def _call(call: AgentCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
