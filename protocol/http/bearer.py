"""The bearer token of a cluster's HTTP services, read from a file. The token appears in no message and no log.

A request without it gets 401, on every path but /health.
"""

import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from starlette.responses import JSONResponse

from protocol.errors import OperatorError

MIN_TOKEN_LENGTH = 16
_UNAUTHORISED = JSONResponse(
    {"detail": "this service asks for the cluster's token: Authorization: Bearer TOKEN"},
    401,
    {"www-authenticate": "Bearer"},
)

# ASGI
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def read_token(path: str | Path) -> str:
    """Return the token in a file, without surrounding white space.

    Raises: OperatorError when the file cannot be read or holds no usable token.
    """
    cure = f"Make it with: openssl rand -hex 16 > {path}. A cluster makes its own when it starts."
    try:
        token = Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise OperatorError(f"token file {path}: cannot be read ({error}). {cure}") from None
    if len(token) < MIN_TOKEN_LENGTH or not token.isprintable() or " " in token:
        raise OperatorError(
            f"token file {path}: expected one printable word of at least {MIN_TOKEN_LENGTH} characters. {cure}"
        )
    return token


def is_authorised(header: bytes | None, token: str) -> bool:
    """Return whether an Authorization header carries the token, by a comparison in constant time."""
    scheme, _, given = (header or b"").partition(b" ")
    return scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), token.encode())


class BearerGate:
    """ASGI middleware: 401 for a request without the token, except on /health."""

    def __init__(self, app: App, token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/health":
            header = next((value for name, value in scope["headers"] if name == b"authorization"), None)
            if not is_authorised(header, self._token):
                await _UNAUTHORISED(scope, receive, send)
                return
        await self._app(scope, receive, send)
