"""A service's address: its command-line options, and its socket, which is bound before anything slow starts."""

import argparse
import errno
import socket
from pathlib import Path

from protocol.addresses import family_of, with_port
from protocol.errors import OperatorError


def bind(service: str, host: str, port: int) -> socket.socket:
    """Return a socket bound to host and port, not yet listening. Port 0 takes a free port.

    Raises: OperatorError when the address is in use, not allowed or not of this machine.
    """
    bound = socket.socket(family_of(host), socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except (OSError, OverflowError) as error:
        bound.close()
        number = getattr(error, "errno", None)
        if number == errno.EADDRINUSE:
            advice = f"port {port} of {host} is taken. Stop that process, or choose another --port."
        else:
            advice = f"cannot listen on {host} port {port} ({error}). Choose another --host or --port."
        raise OperatorError(f"{service}: {advice}") from None
    return bound


def add_listen_options(parser: argparse.ArgumentParser, default_port: int) -> None:
    """Add --host, --port and --token-file."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=default_port, help="port to listen on; 0: a free one")
    parser.add_argument("--token-file", type=Path, help="require the bearer token in this file (not on /health)")


def positive(text: str) -> int:
    """Return an option's number. Raises: ArgumentTypeError below 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"is {text}, expected a number of at least 1")
    return int(text)


def address_of(bound: socket.socket) -> str:
    """Return the http:// address of a bound socket."""
    host, port = bound.getsockname()[:2]
    return f"http://{with_port(host, port)}"
