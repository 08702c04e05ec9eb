"""The ways in which somebody without an allowed key can come to a coordinator's port. For `tests.chaos.strangers`.

Each comes with a message for the application on its lips: one frame of it that arrives there is a door left open.
"""

import socket
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any

import zmq

from protocol.wire.channel import KeyPair
from protocol.wire.codec import encode
from protocol.wire.messages import Hello

_WORDS = encode(Hello(run_id="r1", incarnation=1, server="stranger", policy_version=0))
Closer = Callable[[], None]


class Door:
    """Where strangers knock: the address, and what an attacker may have learned: both public keys."""

    def __init__(self, address: str, server_key: bytes, allowed_key: bytes) -> None:
        self.address = address
        self.server_key = server_key
        self.allowed_key = allowed_key


def knock(kind: str, door: Door, context: "zmq.Context[Any]", random: Random) -> Closer:
    """Connect as a stranger of this kind and send; returns what closes the connection."""
    if kind in _SOCKETS:
        dealer = context.socket(zmq.DEALER)
        dealer.linger = 0
        dealer.reconnect_ivl = -1
        dealer.identity = f"stranger-{random.getrandbits(32)}".encode()
        _SOCKETS[kind](dealer, door)
        dealer.connect(door.address)
        with suppress(zmq.Again):  # it was turned away already
            dealer.send_multipart(_WORDS, zmq.NOBLOCK)
        return dealer.close
    host, port = door.address.removeprefix("tcp://").rsplit(":", 1)
    raw = socket.create_connection((host, int(port)), timeout=10.0)
    raw.sendall(_BYTES[kind](random))
    return raw.close


# -- with libzmq ------------------------------------------------------------------------------------------------------


def _wrong_key(dealer: Any, door: Door) -> None:
    dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
    dealer.curve_serverkey = door.server_key


def _stolen_public_key(dealer: Any, door: Door) -> None:
    """An allowed public key without its secret."""
    dealer.curve_publickey, dealer.curve_secretkey = door.allowed_key, zmq.curve_keypair()[1]
    dealer.curve_serverkey = door.server_key


def _wrong_server_key(dealer: Any, door: Door) -> None:
    dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
    dealer.curve_serverkey = zmq.curve_keypair()[0]


def _no_keys(dealer: Any, door: Door) -> None:
    """The NULL mechanism, as it is without any option."""


def _password(dealer: Any, door: Door) -> None:
    dealer.plain_username, dealer.plain_password = b"sluice", b"\xff\xfe secret"


_SOCKETS: dict[str, Callable[[Any, Door], None]] = {
    "wrong_key": _wrong_key,
    "stolen_public_key": _stolen_public_key,
    "wrong_server_key": _wrong_server_key,
    "no_keys": _no_keys,
    "password": _password,
}


# -- by hand, in the words of ZMTP (rfc.zeromq.org/spec/23, and 13 and 15 for the older versions) --------------------


def new_keys() -> KeyPair:
    return KeyPair(*zmq.curve_keypair())


def _greeting(mechanism: bytes) -> bytes:
    return b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism.ljust(20, b"\0") + bytes(32)


def _frames(random: Random) -> bytes:
    return b"".join(
        bytes((1 if place < len(_WORDS) - 1 else 0, len(frame))) + frame for place, frame in enumerate(_WORDS)
    )


def _command(name: bytes, body: bytes) -> bytes:
    content = bytes((len(name),)) + name + body
    return b"\x04" + bytes((len(content),)) + content


_READY = _command(b"READY", b"\x0bSocket-Type\x00\x00\x00\x06DEALER")
_BYTES: dict[str, Callable[[Random], bytes]] = {
    "garbage": lambda random: random.randbytes(random.randint(1, 400)),
    "http": lambda random: b"GET / HTTP/1.1\r\nHost: coordinator\r\n\r\n",
    "silence": lambda random: b"",
    "half_greeting": lambda random: _greeting(b"CURVE")[: random.randint(1, 63)],
    "greeting_alone": lambda random: _greeting(b"CURVE"),
    "no_handshake": lambda random: _greeting(b"CURVE") + _frames(random),
    "garbled_handshake": lambda random: _greeting(b"CURVE") + _command(b"HELLO", random.randbytes(194)),
    "long_handshake": lambda random: _greeting(b"CURVE") + b"\x06" + (1 << 62).to_bytes(8, "big") + b"x" * 4000,
    "forged_message": lambda random: _greeting(b"CURVE") + _command(b"MESSAGE", random.randbytes(100)),
    "forged_ready": lambda random: _greeting(b"CURVE") + _READY + _frames(random),
    "null_by_hand": lambda random: _greeting(b"NULL") + _READY + _frames(random),
    "older_version_1": lambda random: b"\x01\x00" + b"\x06\x00hello",
    "older_version_2": lambda random: b"\xff" + bytes(7) + b"\x01\x7f\x01\x05" + b"\x00\x00" + _frames(random),
}
KINDS = (*_SOCKETS, *_BYTES)
