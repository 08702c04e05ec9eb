"""The endpoint's HTTP server: OpenAI's paths for agents, and /sluice/sessions for programs that request samples.

    POST /v1/chat/completions, /v1/responses    a turn of the policy; GET /v1/models
    POST /sluice/sessions                       a sample to play: its row and its key
    POST /sluice/sessions/ID/reward, /finish    end of the sample, with the agent's reward or without

Errors have OpenAI's form. A session that has ended answers every request with 410 and the reason.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI, Header, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CollectorRegistry, Counter
from starlette.exceptions import HTTPException

from protocol.errors import OperatorError
from protocol.http.app import BodyTimeoutError, BodyTooLargeError, make_app, read_body
from protocol.http.bodies import BodyError, read_request
from protocol.http.listen import PortTakenError, bind
from rollout.endpoint.chat import answer_chat, read_chat
from rollout.endpoint.rendering import Rendering
from rollout.endpoint.requests import Refusal, RewardBody, SessionBody, error_body
from rollout.endpoint.responses import answer_responses, read_responses
from rollout.endpoint.retries import RequestId
from rollout.endpoint.session import AgentSession
from rollout.endpoint.sessions import Sessions
from rollout.endpoint.turns import TurnReply, TurnRequest

_log = logging.getLogger(__name__)
_MAX_BODY_BYTES = 32 << 20
_BODY_S = 60.0
_BACKLOG = 4096
_CLOSE_S = 10.0
_NUM_PORTS = 256
_MEDIA_TYPES = ("application/json", "text/event-stream")  # whole, streamed
_Key = Annotated[str | None, Header(alias="Authorization")]


def make_endpoint_app(sessions: Sessions, rendering: Rendering, base_url: str) -> FastAPI:
    """Return the app. base_url: base URL of agents' OpenAI clients."""
    registry = CollectorRegistry()
    requests = Counter("sluice_agent_requests", "Answers to agents' requests.", ["status"], registry=registry)
    app = make_app("Sluice agents", registry, requests)
    _answer_errors_as_openai(app)
    _add_turns(app, sessions, rendering)
    _add_sessions(app, sessions, base_url)
    return app


def listen(host: str, port: int) -> socket.socket:
    """Return a socket on the first free port from `port` on; 0: any free port.

    Raises: OperatorError when no port is free, or the host is not an address of this machine.
    """
    last = min(port + _NUM_PORTS - 1, 65535) if port else 0
    for number in range(port, last + 1):
        try:
            return bind("agents", host, number)
        except OperatorError as error:
            if number == last or not isinstance(error, PortTakenError):
                raise OperatorError(f"settings: agents.host = {host}, agents.port = {port}: {error}") from None
    raise AssertionError("no port was tried")


class EndpointServer:
    """Serves one app on one socket, in the running event loop, until it is closed."""

    def __init__(self, app: FastAPI, listener: socket.socket) -> None:
        listener.listen(_BACKLOG)
        # h11 bounds a request's head (64 KiB) before its key is checked; httptools, where installed, does not.
        config = uvicorn.Config(
            app,
            http="h11",
            log_level="critical",
            access_log=False,
            lifespan="off",
            timeout_keep_alive=75,
            timeout_graceful_shutdown=1,
        )
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]), name="agents-http")

    async def close(self) -> None:
        """Close the socket and all connections."""
        self._server.should_exit = True
        done, _ = await asyncio.wait([self._task], timeout=_CLOSE_S)
        if not done:
            self._task.cancel()
            _log.warning("agents  the OpenAI-compatible address did not close within %g s", _CLOSE_S)


class _Server(uvicorn.Server):
    """Does not install uvicorn's signal handlers: signals belong to the process that runs the server."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _add_turns(app: FastAPI, sessions: Sessions, rendering: Rendering) -> None:
    async def read(request: Request, session: AgentSession, parse: Callable[..., Any], *more: Any) -> tuple[Any, ...]:
        """Return a request's bytes, its body and the turn that it asks for."""
        raw = await _read_raw(request)
        session.end.check_open()
        body, turn_request = await rendering.run(rendering.read, parse, raw, session.sampling, *more)
        session.end.check_open()
        return RequestId.of(request, raw), body, turn_request

    async def turn(request: Request, session: AgentSession, sent: RequestId, turn_request: TurnRequest) -> TurnReply:
        pending = session.retries.begin(sent, lambda: session.turn(turn_request))
        try:
            reply = await pending.wait(request)
        except Refusal:
            session.end.check_open()  # the end of the session is the reason
            raise
        session.mark_sent(reply)
        return reply

    @app.post("/v1/chat/completions")
    async def chat(request: Request, authorization: _Key = None) -> Response:
        session = sessions.of_key(authorization)
        sent, body, turn_request = await read(request, session, read_chat)
        reply = await turn(request, session, sent, turn_request)
        return Response(answer_chat(reply, body), media_type=_MEDIA_TYPES[bool(body.stream)])

    @app.post("/v1/responses")
    async def responses(request: Request, authorization: _Key = None) -> Response:
        session = sessions.of_key(authorization)
        sent, body, turn_request = await read(request, session, read_responses, session.histories)
        reply = await turn(request, session, sent, turn_request)
        session.histories.add(reply, body, turn_request)
        return Response(answer_responses(reply, body), media_type=_MEDIA_TYPES[bool(body.stream)])

    @app.get("/v1/models")
    async def models(authorization: _Key = None) -> dict[str, Any]:
        sessions.of_key(authorization)
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "sluice"}
        return {"object": "list", "data": [model]}


def _add_sessions(app: FastAPI, sessions: Sessions, base_url: str) -> None:
    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"num_sessions": sessions.num_open}

    @app.post("/sluice/sessions")
    async def take(request: Request, authorization: _Key = None) -> Response:
        sessions.check_token(authorization)
        body = read_request(SessionBody, await _read_raw(request) or b"{}")
        session = await sessions.take(body.wait_s)
        if session is None:
            return Response(status_code=204)
        if await request.is_disconnected():
            sessions.offer_again(session)
            return Response(status_code=499)
        sample, task = session.sample, session.sample.task
        reply = {
            "id": session.end.id,
            "api_key": session.end.api_key,
            "base_url": base_url,
            "sample": sample.key,
            "kind": sample.kind,
            "prompt": task.prompt,
            "label": task.label,
            "columns": dict(task.columns),
            "is_greedy": task.is_greedy,
            "idle_timeout_s": session.settings.idle_timeout_s,
        }
        return JSONResponse(reply)

    @app.post("/sluice/sessions/{name}/reward")
    async def reward(name: str, request: Request, authorization: _Key = None) -> dict[str, Any]:
        report = sessions.of_report(name, authorization)
        return report(read_request(RewardBody, await _read_raw(request)))

    @app.post("/sluice/sessions/{name}/finish")
    async def finish(name: str, authorization: _Key = None) -> dict[str, Any]:
        return sessions.of_report(name, authorization)(None)


async def _read_raw(request: Request) -> bytes:
    return await read_body(request, _MAX_BODY_BYTES, _BODY_S)


def _answer_errors_as_openai(app: FastAPI) -> None:
    async def answer_refusal(request: Request, error: Exception) -> Response:
        assert isinstance(error, Refusal)
        return JSONResponse(error.body(), error.status)

    # Handlers are async: FastAPI runs plain functions in a thread.
    def answer_with(status: int) -> Callable[[Request, Exception], Awaitable[Response]]:
        async def reply(request: Request, error: Exception) -> Response:
            return JSONResponse(error_body(status, str(error)), status)

        return reply

    async def answer_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return JSONResponse(error_body(error.status_code, str(error.detail)), error.status_code)

    app.add_exception_handler(Refusal, answer_refusal)
    app.add_exception_handler(HTTPException, answer_http_error)
    app.add_exception_handler(BodyError, answer_with(400))
    app.add_exception_handler(BodyTooLargeError, answer_with(413))
    app.add_exception_handler(BodyTimeoutError, answer_with(408))
