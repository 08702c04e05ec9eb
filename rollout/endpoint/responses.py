"""POST /v1/responses: items in place of messages, as the OpenAI Agents SDK and pydantic-ai send them by default.

The history comes in `input`, or an earlier response stands for its part of it (`previous_response_id`). `instructions`
are the system message of one request. A reasoning item of another model becomes the thought before its turn.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from protocol.http.bodies import read_request
from rollout.endpoint.messages import Message, in_turns, read_content, read_messages, thought_of
from rollout.endpoint.requests import Refusal, SessionSampling, TurnBody, check_others, check_tool, may_call
from rollout.endpoint.turns import TurnReply, TurnRequest

_Items = Annotated[list[dict[str, Any]], Field(min_length=1, max_length=10_000)]


class ResponsesBody(TurnBody):
    """The request. `check_others` checks all other fields."""

    input: str | _Items  # conversation so far, or its part after the previous response
    instructions: str | None = None  # system message of this request
    previous_response_id: str | None = None  # response of this session that the input continues
    max_output_tokens: Annotated[int, Field(gt=0)] | None = None  # most tokens of the turn


class Histories:
    """Messages up to each response of a session, without instructions."""

    def __init__(self) -> None:
        self._by_id: dict[str, list[Message]] = {}

    def add(self, reply: TurnReply, body: ResponsesBody, request: TurnRequest) -> None:
        """Keep the messages up to a response."""
        calls = [call.in_chat for call in reply.text.calls]
        turn = {"role": "assistant", "content": reply.text.content, "tool_calls": calls}
        first = 0 if body.instructions is None else 1
        self._by_id[_id(reply)] = [*request.messages[first:], *read_messages([turn])]

    def up_to(self, response: str | None) -> list[Message]:
        """Return the messages up to a response's id; [] for None. Raises: Refusal for an id of another session."""
        if response is None:
            return []
        if response not in self._by_id:
            problem = f"previous_response_id = {response[:80]} is not a response of this session"
            raise Refusal(400, problem, "previous_response_id", "previous_response_not_found")
        return self._by_id[response]


def read_responses(raw: bytes, sampling: SessionSampling, histories: Histories) -> tuple[ResponsesBody, TurnRequest]:
    """Return a request. Raises: Refusal, BodyError."""
    body = read_request(ResponsesBody, raw)
    check_others(body, sampling)
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    new = read_messages(_messages_of(items), "input")
    instructions = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    tools = [_read_tool(tool, f"tools[{place}]") for place, tool in enumerate(body.tools or [])]
    request = TurnRequest(
        messages=in_turns([*read_messages(instructions), *histories.up_to(body.previous_response_id), *new]),
        tools=tools,
        template_kwargs=body.chat_template_kwargs or {},
        may_call=may_call(body.tool_choice, tools),
        stops=(),
        max_tokens=body.max_output_tokens,
    )
    return body, request


def answer_responses(reply: TurnReply, body: ResponsesBody) -> bytes:
    """Return the answer: JSON, or events if the request asks for a stream."""
    response = _response(reply, body)
    if not body.stream:
        return json.dumps(response).encode()
    events = enumerate(_events(response))
    return b"".join(
        f"event: {kind}\ndata: {json.dumps({'type': kind, 'sequence_number': number, **event})}\n\n".encode()
        for number, (kind, event) in events
    )


def _messages_of(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return items as chat messages. The thoughts, the text and the calls of one turn become one message.

    A thought without a text or a call after it is a turn of its own.
    Raises: Refusal naming an item of another type.
    """
    messages: list[dict[str, Any]] = []
    thought = ""
    for place, item in enumerate(items):
        kind = item.get("type") or "message"
        is_of_policy = kind in ("reasoning", "function_call") or (kind, item.get("role")) == ("message", "assistant")
        if thought and not is_of_policy:
            messages.append({"role": "assistant", "content": thought})
            thought = ""
        if kind == "reasoning":
            thought += thought_of(read_content(item.get("content") or item.get("summary"), f"input[{place}]"))
        elif kind == "function_call_output":
            content = read_content(item.get("output"), f"input[{place}].output")
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        elif kind == "message" and item.get("role") != "assistant":
            messages.append({"role": item.get("role"), "content": item.get("content")})
        elif kind == "message":
            content = thought + read_content(item.get("content"), f"input[{place}].content")
            messages.append({"role": "assistant", "content": content})
            thought = ""
        elif kind == "function_call":
            turn = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
            if thought or turn is None:
                messages.append(turn := {"role": "assistant", "content": thought})
                thought = ""
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            turn.setdefault("tool_calls", []).append(call)
        else:
            known = "message, function_call, function_call_output and reasoning"
            problem = f"input[{place}].type = {kind!r:.40} cannot be read here: only {known} can"
            raise Refusal(400, problem, f"input[{place}].type", "unsupported_value")
    if thought:
        messages.append({"role": "assistant", "content": thought})
    return messages


def _read_tool(tool: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return a tool in the form of chat completions. Raises: Refusal."""
    check_tool(tool, tool, path)
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def _id(reply: TurnReply) -> str:
    return f"resp_{reply.id}"


def _response(reply: TurnReply, body: ResponsesBody) -> dict[str, Any]:
    text, before = reply.text, reply.num_prompt_tokens
    is_cut = text.finish == "length"
    status = "incomplete" if is_cut else "completed"
    output: list[dict[str, Any]] = []
    if text.content or not text.calls:
        part = {"type": "output_text", "text": text.content, "annotations": []}
        item = {"type": "message", "id": f"msg_{reply.id}", "role": "assistant", "status": status, "content": [part]}
        output.append(item)
    for call in text.calls:
        written = {"call_id": call.id, "name": call.name, "arguments": call.arguments_text}
        output.append({"type": "function_call", "id": f"fc_{call.id}", "status": "completed", **written})
    return {
        "id": _id(reply),
        "object": "response",
        "created_at": reply.created,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": {},
        "model": body.model or "policy",
        "output": output,
        "parallel_tool_calls": True,
        "previous_response_id": body.previous_response_id,
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_p": None,
        "usage": {
            "input_tokens": before,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": text.num_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": before + text.num_tokens,
        },
    }


def _events(response: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the type and the fields of each event. Every text and every call is one delta."""
    begun = {**response, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
    for index, item in enumerate(response["output"]):
        at = {"output_index": index, "item_id": item["id"]}
        is_call = item["type"] == "function_call"
        empty: dict[str, Any] = {"arguments": ""} if is_call else {"content": []}
        yield "response.output_item.added", {"output_index": index, "item": {**item, "status": "in_progress", **empty}}
        if is_call:
            yield "response.function_call_arguments.delta", {**at, "delta": item["arguments"]}
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield "response.function_call_arguments.done", {**at, **done}
        else:
            (part,) = item["content"]
            at["content_index"] = 0
            yield "response.content_part.added", {**at, "part": {**part, "text": ""}}
            yield "response.output_text.delta", {**at, "delta": part["text"], "logprobs": []}
            yield "response.output_text.done", {**at, "text": part["text"], "logprobs": []}
            yield "response.content_part.done", {**at, "part": part}
        yield "response.output_item.done", {"output_index": index, "item": item}
    yield f"response.{response['status']}", {"response": response}
