"""Frames on the wire: a MessagePack header, validated against its type, then raw buffers.

Used by `protocol.channel` on every socket. Limits are checked before anything is decoded, so that a hostile frame costs
no more than its own bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from protocol.messages import SCHEMA_VERSION, Message
from protocol.trajectory import FrameError

M = TypeVar("M")


@dataclass(frozen=True)
class Limits:
    """Largest accepted sizes of one message."""

    header_bytes: int = 1 << 20
    buffer_bytes: int = 1 << 26
    num_buffers: int = 3


class _Stamp(msgspec.Struct, kw_only=True):
    schema: int


_encoder = msgspec.msgpack.Encoder()
_stamp_decoder = msgspec.msgpack.Decoder(_Stamp)


def encode(message: Message, buffers: Sequence[bytes] = ()) -> list[bytes]:
    """Return the frames of a message: header first, then its buffers."""
    return [_encoder.encode(message), *buffers]


class Decoder(Generic[M]):
    """Turns frames into messages of one direction (a union of message types).

    Example:
        >>> message, buffers = Decoder(ToServer).decode(frames)
    """

    def __init__(self, union: Any, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(union)

    def decode(self, frames: Sequence[bytes]) -> tuple[M, list[bytes]]:
        """Return the message and its buffers.

        Raises: FrameError whose text has the path of the bad field ("$.facts.reward") and whose reason is one of
        "empty", "oversized", "schema", "invalid".
        """
        limits = self._limits
        if not frames:
            raise FrameError("$", "no frames", "empty")
        header, buffers = frames[0], list(frames[1:])
        if len(header) > limits.header_bytes:
            raise FrameError("$", f"header of {len(header)} bytes, at most {limits.header_bytes}", "oversized")
        if len(buffers) > limits.num_buffers:
            raise FrameError("$", f"{len(buffers)} buffers, at most {limits.num_buffers}", "oversized")
        for i, buffer in enumerate(buffers):
            if len(buffer) > limits.buffer_bytes:
                raise FrameError(
                    f"$[{i}]", f"buffer of {len(buffer)} bytes, at most {limits.buffer_bytes}", "oversized"
                )
        try:
            schema = _stamp_decoder.decode(header).schema
            if schema != SCHEMA_VERSION:
                raise FrameError(
                    "$.schema",
                    f"is {schema}, this process speaks {SCHEMA_VERSION}. Run the same version of Sluice everywhere",
                    "schema",
                )
            return self._decoder.decode(header), buffers
        except msgspec.ValidationError as error:
            text, _, path = str(error).partition(" - at `")
            raise FrameError(path.rstrip("`") or "$", text) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise FrameError("$", f"not a message: {error}") from None
