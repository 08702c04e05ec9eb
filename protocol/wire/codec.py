"""Frames on the wire: a MessagePack header, raw buffers, and the seal over all of them.

Sizes are compared before anything is read and the seal before anything is
decoded, so that a hostile frame costs no more than its own bytes and a damaged one never becomes data.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from protocol.errors import FrameError
from protocol.wire.header_shape import MAX_VALUES, check_shape
from protocol.wire.messages import SCHEMA_VERSION, Message
from protocol.wire.seal import seal

M = TypeVar("M", bound=Message)

# The schema that had no seal: its messages are refused by their version, not as damaged ones.
_UNSEALED_SCHEMA = 1
# A header up to this size cannot become more than a few hundred kB of objects: counting its values would cost more.
_SMALL_HEADER_BYTES = 4096


@dataclass(frozen=True)
class Limits:
    """Largest accepted sizes of one message."""

    header_bytes: int = 1 << 20  # of the MessagePack header
    buffer_bytes: int = 1 << 26  # of one raw buffer
    num_buffers: int = 3  # raw buffers behind the header
    total_bytes: int = 1 << 27  # of all frames, the seal included
    num_values: int | None = MAX_VALUES  # values in the header; None: the message types bound every list


class _Stamp(msgspec.Struct, kw_only=True):
    schema: int


_encoder = msgspec.msgpack.Encoder()
_stamp_decoder = msgspec.msgpack.Decoder(_Stamp)


def encode(message: Message, buffers: Sequence[bytes] = ()) -> list[bytes]:
    """Return the frames of a message: header first, then its buffers, the seal last."""
    frames = [_encoder.encode(message), *buffers]
    frames.append(seal(frames))
    return frames


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
        "empty", "oversized", "checksum", "schema", "invalid".
        """
        if not frames:
            raise FrameError("$", "no frames", "empty")
        _check_sizes(frames, self._limits)
        *content, last = frames
        if seal(content) != last:
            raise _damage(frames[0])
        if not content:
            raise FrameError("$", "no header", "empty")
        header, *buffers = content
        if self._limits.num_values is not None and len(header) > _SMALL_HEADER_BYTES:
            check_shape(header, self._limits.num_values)
        message = self._read(header)
        if len(buffers) != message.num_buffers:
            raise FrameError("$", f"{len(buffers)} buffers, expected {message.num_buffers}")
        return message, buffers

    def _read(self, header: bytes) -> M:
        try:
            schema = _stamp_decoder.decode(header).schema
            if schema != SCHEMA_VERSION:
                raise _other_schema(schema)
            return self._decoder.decode(header)
        except msgspec.ValidationError as error:
            raise _refused(str(error)) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise FrameError("$", f"not a message: {error}") from None


# msgspec says where: "... - at `$.facts.reward`", or "... - at `key` in `$.metrics`" for a key of a map.
_WHERE = re.compile(r"(?P<text>.*) - at (?P<is_key>`key` in )?`(?P<path>.*)`", re.DOTALL)


def _refused(reason: str) -> FrameError:
    found = _WHERE.fullmatch(reason)
    if found is None:
        return FrameError("$", reason)
    return FrameError(found["path"], f"{found['text']} in each key" if found["is_key"] else found["text"])


def _check_sizes(frames: Sequence[bytes], limits: Limits) -> None:
    """Raise FrameError when there are more frames or bytes than a message may have. The last frame is the seal."""
    num_buffers = max(0, len(frames) - 2)
    if num_buffers > limits.num_buffers:
        raise FrameError("$", f"{num_buffers} buffers, at most {limits.num_buffers}", "oversized")
    if len(frames[0]) > limits.header_bytes:
        raise FrameError("$", f"header of {len(frames[0])} bytes, at most {limits.header_bytes}", "oversized")
    sizes = [len(frame) for frame in frames]
    for i, size in enumerate(sizes[1:]):
        if size > limits.buffer_bytes:
            raise FrameError(f"$[{i}]", f"buffer of {size} bytes, at most {limits.buffer_bytes}", "oversized")
    if sum(sizes) > limits.total_bytes:
        raise FrameError("$", f"{sum(sizes)} bytes, at most {limits.total_bytes}", "oversized")


def _damage(header: bytes) -> FrameError:
    """Return the refusal of frames that their seal does not fit. Nothing but a schema without seals is read of them."""
    try:
        if _stamp_decoder.decode(header).schema == _UNSEALED_SCHEMA:
            return _other_schema(_UNSEALED_SCHEMA)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    return FrameError("$", "the frames are not the ones that were sealed: damaged on the way", "checksum")


def _other_schema(schema: int) -> FrameError:
    return FrameError(
        "$.schema",
        f"is {schema}, this process speaks {SCHEMA_VERSION}. Run the same version of Sluice everywhere",
        "schema",
    )
