"""Answers in OpenAI's form, in vLLM's own types: whole, or as a stream in which a turn is one event.

The door to `vllm.entrypoints.openai`. Imports are inside functions: a process that generates nothing never loads vLLM.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rollout.endpoint.branches import Branch
from rollout.endpoint.rendering import TurnRequest, TurnText

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
    from vllm.entrypoints.generate.base.protocol import FunctionCall, ToolCall
    from vllm.entrypoints.openai.chat_completion.protocol import (
        ChatCompletionResponse,
        ChatCompletionResponseChoice,
        ChatMessage,
    )

    text = reply.text
    calls = [ToolCall(id=each.id, function=FunctionCall(name=each.name, arguments=each.arguments))
             for each in text.calls]  # fmt: skip
    message = ChatMessage(role="assistant", content=_content(text), tool_calls=calls)
    choice = ChatCompletionResponseChoice(
        index=0, message=message, finish_reason=text.finish, logprobs=_chat_logprobs(reply, request)
    )
    answer = ChatCompletionResponse(**_head(reply, request), choices=[choice], usage=_usage(reply))
    return bytes(answer.model_dump_json(), "utf-8")


def chat_events(reply: TurnReply, request: TurnRequest) -> Iterator[bytes]:
    """Yield a chat completion as server-sent events: the turn, its end, and the usage if the request has asked."""
    from vllm.entrypoints.generate.base.protocol import DeltaFunctionCall, DeltaMessage, DeltaToolCall
    from vllm.entrypoints.openai.chat_completion.protocol import (
        ChatCompletionResponseStreamChoice,
        ChatCompletionStreamResponse,
    )

    text = reply.text
    calls = [
        DeltaToolCall(index=place, id=each.id, type="function",
                      function=DeltaFunctionCall(name=each.name, arguments=each.arguments))
        for place, each in enumerate(text.calls)
    ]  # fmt: skip
    delta = DeltaMessage(role="assistant", content=_content(text), tool_calls=calls)
    logprobs = _chat_logprobs(reply, request)
    choices = [
        [ChatCompletionResponseStreamChoice(index=0, delta=delta, logprobs=logprobs)],
        [ChatCompletionResponseStreamChoice(index=0, delta=DeltaMessage(), finish_reason=text.finish)],
    ]
    for each in choices:
        yield _event(ChatCompletionStreamResponse(**_head(reply, request), choices=each))
    if _wants_usage(request):
        yield _event(ChatCompletionStreamResponse(**_head(reply, request), choices=[], usage=_usage(reply)))


def text_answer(reply: TurnReply, request: TurnRequest) -> bytes:
    """Return a completion of a text or of tokens as JSON."""
    from vllm.entrypoints.openai.completion.protocol import CompletionResponse, CompletionResponseChoice

    choice = CompletionResponseChoice(**_text_choice(reply, request))
    answer = CompletionResponse(**_head(reply, request), choices=[choice], usage=_usage(reply))
    return bytes(answer.model_dump_json(), "utf-8")


def text_events(reply: TurnReply, request: TurnRequest) -> Iterator[bytes]:
    """Yield a completion as server-sent events."""
    from vllm.entrypoints.openai.completion.protocol import CompletionResponseStreamChoice, CompletionStreamResponse

    choice = CompletionResponseStreamChoice(**_text_choice(reply, request))
    yield _event(CompletionStreamResponse(**_head(reply, request), choices=[choice]))
    if _wants_usage(request):
        yield _event(CompletionStreamResponse(**_head(reply, request), choices=[], usage=_usage(reply)))


def error_event(body: dict[str, Any]) -> bytes:
    """Return the event of an error in a stream that has begun."""
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def _event(answer: Any) -> bytes:
    return b"data: " + bytes(answer.model_dump_json(), "utf-8") + b"\n\n"


def _head(reply: TurnReply, request: TurnRequest) -> dict[str, Any]:
    fingerprint = f"version-{reply.policy_version}"
    model = request.body.model or "policy"
    return {"id": reply.id, "created": reply.created, "model": model, "system_fingerprint": fingerprint}


def _usage(reply: TurnReply) -> Any:
    from vllm.entrypoints.serve.engine.protocol import UsageInfo

    before, written = reply.num_prompt_tokens, len(reply.text.ids)
    return UsageInfo(prompt_tokens=before, completion_tokens=written, total_tokens=before + written)


def _wants_usage(request: TurnRequest) -> bool:
    return bool((request.body.stream_options or {}).get("include_usage"))


def _content(text: TurnText) -> str | None:
    return text.content or (None if text.calls else "")


def _chat_logprobs(reply: TurnReply, request: TurnRequest) -> Any:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionLogProbs, ChatCompletionLogProbsContent

    if not request.has_logprobs:
        return None
    return ChatCompletionLogProbs(
        content=[
            ChatCompletionLogProbsContent(token=token, logprob=logprob, bytes=list(token.encode(errors="replace")))
            for token, logprob in reply.text.logprobs
        ]
    )


def _text_choice(reply: TurnReply, request: TurnRequest) -> dict[str, Any]:
    text, logprobs = reply.text, None
    if request.has_logprobs:
        tokens = [token for token, _ in text.logprobs]
        logprobs = {"tokens": tokens, "token_logprobs": [logprob for _, logprob in text.logprobs]}
    return {"index": 0, "text": text.content, "finish_reason": text.finish, "logprobs": logprobs, "token_ids": text.ids}
