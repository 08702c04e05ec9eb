"""How an HTTP service of the cluster is served once it is ready."""

import argparse
import gc
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any

import uvicorn

from protocol.errors import OperatorError
from protocol.http.bearer import BearerGate
from protocol.http.listen import address_of
from protocol.http.turn_away import TurnAway, turning_away

_BACKLOG = 1024
# So long the event loop waits for a thread that computes, each time that it has looked for what came.
_SWITCH_S = 0.0005


def run_service(parser: argparse.ArgumentParser, serve: Callable[[argparse.Namespace], None]) -> int:
    """Return the exit code of a service's command. An OperatorError is printed in one line."""
    arguments = parser.parse_args()
    try:
        serve(arguments)
    except OperatorError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def serve_app(
    app: Any,
    listener: socket.socket,
    token: str | None,
    introduction: str,
    others: Sequence[socket.socket] = (),
    turn_away: TurnAway | None = None,
) -> None:
    """Serve an ASGI application on bound sockets until the process is told to end.

    token: what every request has to bring, but for /health; None: nothing is asked for. Once it can be called it
    prints `introduction` and the listener's address. others: addresses besides.
    turn_away: requests that the application refuses while it is full.
    """
    # From here on connections wait in the backlog instead of being refused: who reads the line may call at once.
    sockets = [*others, listener]
    for bound in sockets:
        bound.listen(_BACKLOG)
    print(f"{introduction}, {address_of(listener)}", flush=True)
    # What was loaded stays: a collection that walks through it all would hold every answer up for a third of a second.
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(_SWITCH_S)
    # h11 bounds a request's head (64 KiB) before anybody has shown a token; httptools, where installed, does not.
    config = uvicorn.Config(
        BearerGate(app, token) if token is not None else app,
        http=turning_away(turn_away, token) if turn_away is not None else "h11",
        log_level="warning",
        access_log=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=5,
    )
    uvicorn.Server(config).run(sockets=sockets)
