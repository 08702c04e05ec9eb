"""The endpoint as a FastAPI app: OpenAI's paths for agents, and /sluice/sessions for programs that ask for samples.

    POST /v1/chat/completions, /v1/completions    a turn of the policy; GET /v1/models
    POST /sluice/sessions                         a sample to play: its row, and the key that it is played with
    POST /sluice/sessions/ID/reward, /finish      the sample is finished, with a reward of the agent's or without

Errors have OpenAI's form. A session that has ended answers 410 to everything, with the reason.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, Header, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CollectorRegistry, Counter
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from protocol.http.app import BodyTimeoutError, BodyTooLargeError, make_app, read_body
from protocol.http.bodies import BodyError, read_request
from rollout.endpoint.answering import Answering, answer
from rollout.endpoint.answers import chat_completion, chat_events, text_completion, text_events
from rollout.endpoint.bodies import (
    ChatBody,
    RewardBody,
    SessionBody,
    TextBody,
    check_others,
    check_tool_choice,
    single_prompt,
)
from rollout.endpoint.messages import read_messages
from rollout.endpoint.open_sessions import OpenSessions
from rollout.endpoint.refusals import Refused, error_body
from rollout.endpoint.rendering import Asked, AskedChat, AskedText, AskedTokens, Rendering
from rollout.endpoint.retries import Sent

_MAX_BODY_BYTES = 32 << 20
_BODY_S = 60.0
_Body = TypeVar("_Body", bound=BaseModel)
_Key = Annotated[str | None, Header(alias="Authorization")]


def make_endpoint_app(sessions: OpenSessions, rendering: Rendering, base_url: str) -> FastAPI:
    """Return the app. base_url: of OpenAI clients, as agents reach it."""
    registry = CollectorRegistry()
    requests = Counter("sluice_agent_requests", "Answers to agents' requests.", ["status"], registry=registry)
    app = make_app("Sluice agents", registry, requests)
    _answer_errors_as_openai(app)
    _add_turns(app, sessions, rendering)
    _add_sessions(app, sessions, base_url)
    return app


def _add_turns(app: FastAPI, sessions: OpenSessions, rendering: Rendering) -> None:
    @app.post("/v1/chat/completions")
    async def chat(request: Request, authorization: _Key = None) -> Response:
        session = sessions.of_key(authorization)
        raw = await _raw(request)
        session.end.check_open()
        body = read_request(ChatBody, raw)
        check_others(body, session.drawn)
        may_call = check_tool_choice(body.tool_choice) and bool(body.tools)
        if may_call and not rendering.can_call:
            problem = "the model's chat template writes calls in no known way. Set tools.call_format"
            raise Refused(400, problem, "tools", "unsupported_value")
        asked = AskedChat(read_messages(body.messages), body.tools or [], may_call)
        limit = body.max_completion_tokens or body.max_tokens
        answering = Answering(body, bool(body.logprobs), limit, chat_completion, chat_events)
        return await answer(request, session, asked, _sent(request, raw), answering)

    @app.post("/v1/completions")
    async def completions(request: Request, authorization: _Key = None) -> Response:
        session = sessions.of_key(authorization)
        raw = await _raw(request)
        session.end.check_open()
        body = read_request(TextBody, raw)
        check_others(body, session.drawn)
        prompt = single_prompt(body.prompt)
        asked: Asked = AskedText(prompt) if isinstance(prompt, str) else AskedTokens(prompt, rendering.vocabulary)
        if body.logprobs not in (None, False, True, 0):
            raise Refused(400, f"logprobs = {body.logprobs}: only the sampled tokens' are known, ask for 0", "logprobs")
        has_logprobs = body.logprobs is not None and body.logprobs is not False
        answering = Answering(body, has_logprobs, body.max_tokens, text_completion, text_events)
        return await answer(request, session, asked, _sent(request, raw), answering)

    @app.get("/v1/models")
    async def models(authorization: _Key = None) -> dict[str, Any]:
        sessions.of_key(authorization)
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "sluice"}
        return {"object": "list", "data": [model]}


def _add_sessions(app: FastAPI, sessions: OpenSessions, base_url: str) -> None:
    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"num_sessions": sessions.num_open}

    @app.post("/sluice/sessions")
    async def ask(request: Request, authorization: _Key = None) -> Response:
        sessions.check_token(authorization)
        body = read_request(SessionBody, await _raw(request) or b"{}")
        session = await sessions.take(body.wait_s)
        if session is None:
            return Response(status_code=204)
        if await request.is_disconnected():
            sessions.give_back(session)
            return Response(status_code=499)
        sample = session.turns.sample
        told = {"id": session.end.id, "api_key": session.end.api_key, "base_url": base_url}
        told |= {"sample": sample.key, "kind": sample.kind}
        task = sample.task
        row = {"prompt": task.prompt, "label": task.label, "columns": dict(task.columns), "is_greedy": task.is_greedy}
        return JSONResponse({**told, **row, "idle_timeout_s": session.settings.idle_timeout_s})

    @app.post("/sluice/sessions/{name}/reward")
    async def reward(name: str, request: Request, authorization: _Key = None) -> dict[str, Any]:
        return sessions.report(name, authorization, read_request(RewardBody, await _raw(request)))

    @app.post("/sluice/sessions/{name}/finish")
    async def finish(name: str, authorization: _Key = None) -> dict[str, Any]:
        return sessions.report(name, authorization, None)


async def _raw(request: Request) -> bytes:
    try:
        async with asyncio.timeout(_BODY_S):
            return await read_body(request.stream(), request.headers.get("content-length"), _MAX_BODY_BYTES)
    except TimeoutError:
        raise BodyTimeoutError(f"the body was not sent within {_BODY_S:g} s") from None


def _sent(request: Request, raw: bytes) -> Sent:
    digest = hashlib.blake2b(request.url.path.encode() + b"\0" + raw, digest_size=16).digest()
    times = request.headers.get("x-stainless-retry-count", "0")
    return Sent(digest, request.headers.get("idempotency-key"), is_retry=times.isdecimal() and int(times) > 0)


def _answer_errors_as_openai(app: FastAPI) -> None:
    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, Refused)
        return JSONResponse(error.body(), error.status)

    # Not plain functions: each of those would be run in a thread.
    def otherwise(status: int) -> Callable[[Request, Exception], Awaitable[Response]]:
        async def answer_with(request: Request, error: Exception) -> Response:
            return JSONResponse(error_body(status, str(error)), status)

        return answer_with

    async def of_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return JSONResponse(error_body(error.status_code, str(error.detail)), error.status_code)

    app.add_exception_handler(Refused, refused)
    app.add_exception_handler(HTTPException, of_http)
    app.add_exception_handler(BodyError, otherwise(400))
    app.add_exception_handler(BodyTooLargeError, otherwise(413))
    app.add_exception_handler(BodyTimeoutError, otherwise(408))
