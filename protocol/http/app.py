"""FastAPI apps of the services: bodies with a size limit, errors as JSON, answers counted by status.

FastAPI itself reads and parses a body of any size before it validates it, so that bodies are read here.
Each app is documented at /docs and /openapi.json, behind the token if there is one.
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

from protocol.http.bearer import App, Receive, Scope, Send
from protocol.http.bodies import BodyError, read_request

_Body = TypeVar("_Body", bound=BaseModel)


class BodyTimeoutError(Exception):
    """A body was not complete in time."""


class BodyTooLargeError(ValueError):
    """A body is over the limit, for a 413. It was not parsed, and its rest was not read."""


async def read_body(request: Request, max_bytes: int, body_s: float | None = None) -> bytes:
    """Return a request's body.

    body_s: longest time until the body is complete; None: no limit.
    Raises: BodyTooLargeError as soon as the header or the bytes read so far exceed the limit; BodyTimeoutError.
    """
    declared, body = request.headers.get("content-length", ""), bytearray()
    if not declared.isdecimal() or int(declared) <= max_bytes:
        try:
            async with asyncio.timeout(body_s):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > max_bytes:
                        break
                else:
                    return bytes(body)
        except TimeoutError:
            raise BodyTimeoutError(f"the body was not complete within {body_s:g} s") from None
    raise BodyTooLargeError(f"the body is over {max_bytes} bytes")


async def wait_for_disconnect(request: Request) -> None:
    """Return when the client of a request whose body was read has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def make_app(title: str, registry: CollectorRegistry, requests: Counter) -> FastAPI:
    """Return an app without routes but /metrics, which shows `registry`.

    requests: counter of answers to POSTs, labelled by status. Wrong bodies get 408, 413 and 422.
    """
    app = FastAPI(title=title)
    app.add_middleware(_CountAnswers, requests=requests)
    for error, status in _STATUSES.items():
        app.add_exception_handler(error, _handler(status))

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return app


def typed_body(
    model: type[_Body], max_bytes: int, body_s: float | None = None
) -> Callable[[Request], Awaitable[_Body]]:
    """Return a dependency that reads a body as `model`, whatever its content type. body_s: as of `read_body`."""

    async def read(request: Request) -> _Body:
        return read_request(model, await read_body(request, max_bytes, body_s))

    return read


def body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return a route's `openapi_extra` for a body of `typed_body`."""
    content = {"application/json": {"schema": model.model_json_schema()}}
    return {"requestBody": {"content": content, "required": True}}


def _handler(status: int) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def answer(request: Request, error: Exception) -> Response:
        path = {"path": error.path} if isinstance(error, BodyError) else {}
        return JSONResponse({"detail": str(error) or "the client left", **path}, status)

    return answer


_STATUSES: dict[type[Exception], int] = {
    BodyError: 422,
    BodyTooLargeError: 413,
    BodyTimeoutError: 408,
    ClientDisconnect: 499,  # for the count alone
}


class _CountAnswers:
    """ASGI middleware that counts answers to POSTs by status."""

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
