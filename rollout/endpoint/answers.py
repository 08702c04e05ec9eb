"""Answers in OpenAI's form, in vLLM's own types: whole, or as a stream in which a turn is one event.

The door to `vllm.entrypoints.openai`. Imports are inside functions: a process that generates nothing never loads vLLM.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rollout.endpoint.branches import Branch
from rollout.endpoint.rendering import AgentCall, TurnRequest, TurnText

DONE = b"data: [DONE]\n\n"
ALIVE = b": the policy writes\n\n"


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


def chat_answer(reply: TurnReply, request: TurnRequest) -> bytes:
    """Return a chat completion as JSON."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse

    text = reply.text
    message: dict[str, Any] = {"role": "assistant", "content": _content(text)}
    if text.calls:
        message["tool_calls"] = [_call(each) for each in text.calls]
    choice = {"index": 0, "message": message, "finish_reason": text.finish, "logprobs": _chat_logprobs(reply, request)}
    head = _head(reply, request, "chat.completion")
    return _json(ChatCompletionResponse(**head, choices=[choice], usage=_usage(reply)))


def chat_events(reply: TurnReply, request: TurnRequest) -> Iterator[bytes]:
    """Yield a chat completion as server-sent events: the turn, its end, and the usage if the request asks for it."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionStreamResponse

    text, head = reply.text, _head(reply, request, "chat.completion.chunk")
    delta: dict[str, Any] = {"role": "assistant", "content": _content(text)}
    if text.calls:
        delta["tool_calls"] = [{"index": place, **_call(each)} for place, each in enumerate(text.calls)]
    turn = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": _chat_logprobs(reply, request)}
    end = {"index": 0, "delta": {}, "finish_reason": text.finish, "logprobs": None}
    for choice in (turn, end):
        yield _event(ChatCompletionStreamResponse(**head, choices=[choice]))
    if _wants_usage(request):
        yield _event(ChatCompletionStreamResponse(**head, choices=[], usage=_usage(reply)))


def text_answer(reply: TurnReply, request: TurnRequest) -> bytes:
    """Return a completion of a text or of tokens as JSON."""
    from vllm.entrypoints.openai.completion.protocol import CompletionResponse

    choice = _text_choice(reply, request)
    head = _head(reply, request, "text_completion")
    return _json(CompletionResponse(**head, choices=[choice], usage=_usage(reply)))


def text_events(reply: TurnReply, request: TurnRequest) -> Iterator[bytes]:
    """Yield a completion as server-sent events."""
    from vllm.entrypoints.openai.completion.protocol import CompletionStreamResponse

    head = _head(reply, request, "text_completion")
    yield _event(CompletionStreamResponse(**head, choices=[_text_choice(reply, request)]))
    if _wants_usage(request):
        yield _event(CompletionStreamResponse(**head, choices=[], usage=_usage(reply)))


def error_event(body: dict[str, Any]) -> bytes:
    """Return the event of an error in a stream that has begun."""
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def _json(answer: Any) -> bytes:
    # vLLM's types have many fields of their own. As nulls they would break agents that add up the parts of a delta.
    return bytes(answer.model_dump_json(exclude_unset=True), "utf-8")


def _event(answer: Any) -> bytes:
    return b"data: " + _json(answer) + b"\n\n"


def _head(reply: TurnReply, request: TurnRequest, kind: str) -> dict[str, Any]:
    fingerprint = f"version-{reply.policy_version}"
    model = request.body.model or "policy"
    head = {"id": reply.id, "object": kind, "created": reply.created, "model": model}
    return {**head, "system_fingerprint": fingerprint}


def _usage(reply: TurnReply) -> dict[str, int]:
    before, written = reply.num_prompt_tokens, len(reply.text.ids)
    return {"prompt_tokens": before, "completion_tokens": written, "total_tokens": before + written}


def _wants_usage(request: TurnRequest) -> bool:
    return bool((request.body.stream_options or {}).get("include_usage"))


def _content(text: TurnText) -> str | None:
    return text.content or (None if text.calls else "")


def _call(call: AgentCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _chat_logprobs(reply: TurnReply, request: TurnRequest) -> dict[str, Any] | None:
    if not request.has_logprobs:
        return None
    each = [
        {"token": token, "logprob": logprob, "bytes": list(token.encode(errors="replace")), "top_logprobs": []}
        for token, logprob in reply.text.logprobs
    ]
    return {"content": each}


def _text_choice(reply: TurnReply, request: TurnRequest) -> dict[str, Any]:
    text, logprobs = reply.text, None
    if request.has_logprobs:
        tokens = [token for token, _ in text.logprobs]
        logprobs = {"tokens": tokens, "token_logprobs": [logprob for _, logprob in text.logprobs]}
    return {"index": 0, "text": text.content, "finish_reason": text.finish, "logprobs": logprobs, "token_ids": text.ids}
