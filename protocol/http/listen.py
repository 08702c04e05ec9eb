"""A service's address: its command-line options, and its socket, which is bound before anything slow starts."""

import argparse
import errno
import socket
from pathlib import Path

from protocol.addresses import family_of, with_port
from protocol.errors import OperatorError

LOOPBACK = ("127.0.0.1", "::1", "localhost")  # hosts that serve this machine only


class PortTakenError(OperatorError):
    """Another process listens on the port."""


def bind(service: str, host: str, port: int) -> socket.socket:
    """Return a socket bound to host and port, not yet listening. Port 0 takes a free port.

    Raises: PortTakenError when the port is in use; OperatorError for an address that is not allowed or of another host.
    """
    bound = socket.socket(family_of(host), socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except (OSError, OverflowError) as error:
        bound.close()
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            raise PortTakenError(
                f"{service}: port {port} of {host} is taken. Stop that process, or choose another --port."
            ) from None
        raise OperatorError(
            f"{service}: cannot listen on {host} port {port} ({error}). Choose another --host or --port."
        ) from None
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
