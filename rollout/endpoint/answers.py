"""Answers in OpenAI's form: whole, or as the events of a stream, in which a turn comes as one piece."""

import json
from collections.abc import Iterator
from typing import Any

from rollout.endpoint.agent_session import Turned
from rollout.endpoint.turn_text import ToolCall, TurnText


def chat_completion(turned: Turned, model: str, has_logprobs: bool) -> dict[str, Any]:
    """Return a chat completion. model: the name that was asked for."""
    text = turned.text
    message: dict[str, Any] = {"role": "assistant", "content": text.content or (None if text.calls else "")}
    if text.calls:
        message["tool_calls"] = [_call(call) for call in text.calls]
    logprobs = {"content": [_told(*each) for each in text.logprobs]} if has_logprobs else None
    choice = {"index": 0, "message": message, "finish_reason": text.finish, "logprobs": logprobs}
    return {**_head(turned, model, "chat.completion"), "choices": [choice], "usage": usage(turned)}


def chat_events(turned: Turned, model: str, has_logprobs: bool, has_usage: bool) -> Iterator[bytes]:
    """Yield a chat completion as server-sent events. has_usage: the last one tells the tokens used."""
    text, head = turned.text, _head(turned, model, "chat.completion.chunk")
    delta: dict[str, Any] = {"role": "assistant", "content": text.content or (None if text.calls else "")}
    if text.calls:
        delta["tool_calls"] = [{"index": place, **_call(call)} for place, call in enumerate(text.calls)]
    logprobs = {"content": [_told(*each) for each in text.logprobs]} if has_logprobs else None
    yield _event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None, "logprobs": logprobs}]})
    yield _event({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": text.finish, "logprobs": None}]})
    if has_usage:
        yield _event({**head, "choices": [], "usage": usage(turned)})


def text_completion(turned: Turned, model: str, has_logprobs: bool) -> dict[str, Any]:
    """Return a completion of a text or of tokens."""
    choice = _text_choice(turned.text, turned.text.finish, has_logprobs)
    return {**_head(turned, model, "text_completion"), "choices": [choice], "usage": usage(turned)}


def text_events(turned: Turned, model: str, has_logprobs: bool, has_usage: bool) -> Iterator[bytes]:
    """Yield a completion as server-sent events."""
    head = _head(turned, model, "text_completion")
    yield _event({**head, "choices": [_text_choice(turned.text, turned.text.finish, has_logprobs)]})
    if has_usage:
        yield _event({**head, "choices": [], "usage": usage(turned)})


def error_event(body: dict[str, Any]) -> bytes:
    """Return the event of an error that came once the stream had begun."""
    return _event(body)


DONE = b"data: [DONE]\n\n"
ALIVE = b": the policy writes\n\n"


def usage(turned: Turned) -> dict[str, int]:
    """Return the tokens of an answer and of what came before it."""
    prompt, written = turned.num_prompt_tokens, turned.num_tokens
    return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}


def _head(turned: Turned, model: str, kind: str) -> dict[str, Any]:
    fingerprint = f"version-{turned.policy_version}"
    return {
        "id": turned.id,
        "object": kind,
        "created": turned.created,
        "model": model or "policy",
        "system_fingerprint": fingerprint,
    }


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _told(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode(errors="replace")), "top_logprobs": []}


def _text_choice(text: TurnText, finish: str, has_logprobs: bool) -> dict[str, Any]:
    logprobs = None
    if has_logprobs:
        tokens = [token for token, _ in text.logprobs]
        logprobs = {"tokens": tokens, "token_logprobs": [each for _, each in text.logprobs], "top_logprobs": None}
    return {"index": 0, "text": text.content, "finish_reason": finish, "logprobs": logprobs, "token_ids": text.ids}


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"
