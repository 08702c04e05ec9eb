"""Serving an HTTP service of the cluster."""

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

_BACKLOG = 1024
# Longest time that a computing thread keeps the GIL from the event loop.
_SWITCH_S = 0.0005


def run_service(
    parser: argparse.ArgumentParser, given: Sequence[str], serve: Callable[[argparse.Namespace], None]
) -> int:
    """Return the exit code of a service's command. An OperatorError is printed in one line."""
    try:
        serve(parser.parse_args(given))
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
) -> None:
    """Serve an ASGI application on bound sockets until the process is terminated.

    token: required of every request but /health; None: no token is required. others: further sockets.
    Prints `introduction` and the listener's address as soon as clients can connect.
    """
    # Connections wait in the backlog from here on: a client may connect as soon as it reads the line.
    sockets = [*others, listener]
    for bound in sockets:
        bound.listen(_BACKLOG)
    print(f"{introduction}, {address_of(listener)}", flush=True)
    # A collection through everything loaded so far would delay every answer by a third of a second.
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(_SWITCH_S)
    make_server(BearerGate(app, token) if token is not None else app).run(sockets=sockets)


def make_server(app: Any) -> uvicorn.Server:
    """Return a server of an ASGI application, which `run` starts."""
    # h11 limits a request's head (64 KiB) before its token is checked; httptools does not.
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http="h11",
            log_level="warning",
            access_log=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=5,
        )
    )
