"""What every FastAPI app of ours does alike: bounded and typed bodies, errors in words, answers counted by status.

Bodies are read here and not by FastAPI: it takes a body of any size into memory, and parses it, before it looks at it.
Each app shows its form at /docs and /openapi.json (behind the token, where one is asked for).
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.requests import ClientDisconnect

from protocol.http.bodies import BodyError, read_request
from protocol.http.body_limit import BodyTooLargeError, read_body

_Body = TypeVar("_Body", bound=BaseModel)
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class BodyTimeoutError(Exception):
    """A body was not sent whole in time."""


def make_app(title: str, registry: CollectorRegistry, requests: Counter) -> FastAPI:
    """Return an app without routes but /metrics, which shows `registry`.

    requests: counts the answers to POSTs, by its label: the status. Bad bodies are answered 408, 413 and 422.
    """
    app = FastAPI(title=title)
    app.add_middleware(_CountAnswers, requests=requests)
    for error, status in _STATUSES.items():
        app.add_exception_handler(error, _answering(status))

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return app


def typed_body(
    model: type[_Body], max_bytes: int, body_s: float | None = None
) -> Callable[[Request], Awaitable[_Body]]:
    """Return the dependency that reads a request's body as `model`, whatever its content type says.

    body_s: how long sending it may take; None: as long as the client likes.
    """

    async def read(request: Request) -> _Body:
        try:
            async with asyncio.timeout(body_s):
                body = await read_body(request.stream(), request.headers.get("content-length"), max_bytes)
        except TimeoutError:
            raise BodyTimeoutError(f"the body was not sent within {body_s:g} s") from None
        return read_request(model, body)

    return read


def body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return a route's `openapi_extra`, which shows what `typed_body` reads."""
    content = {"application/json": {"schema": model.model_json_schema()}}
    return {"requestBody": {"content": content, "required": True}}


def _answering(status: int) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def answer(request: Request, error: Exception) -> Response:
        path = {"path": error.path} if isinstance(error, BodyError) else {}
        return JSONResponse({"detail": str(error) or "the client left", **path}, status)

    return answer


_STATUSES: dict[type[Exception], int] = {
    BodyError: 422,
    BodyTooLargeError: 413,
    BodyTimeoutError: 408,
    ClientDisconnect: 499,  # nobody hears it; it is counted
}


class _CountAnswers:
    """ASGI middleware that counts."""

    def __init__(self, app: App, requests: Counter) -> None:
        self._app = app
        self._requests = requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return

        async def send_counted(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                self._requests.labels(str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, send_counted)
