"""Frames on the wire: a MessagePack header, raw buffers, and a seal over all of them.

Sizes are checked before anything is read, and the seal before anything is decoded: a damaged frame never becomes data.
The message types bound every list that a peer sends to the coordinator.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import msgspec
import xxhash

from protocol.errors import FrameError
from protocol.wire.messages import SCHEMA_VERSION, Message
from protocol.wire.trajectory import Count, Name

M = TypeVar("M", bound=Message)

# The schema without a seal: its messages are refused by their version, not as damaged ones.
_UNSEALED_SCHEMA = 1
# Errors of msgspec for bytes that are not MessagePack, or values of other types.
_NOT_DECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


@dataclass(frozen=True)
class Limits:
    """Largest accepted sizes of one message."""

    header_bytes: int = 1 << 20  # bytes of the MessagePack header
    buffer_bytes: int = 1 << 26  # bytes of one raw buffer
    num_buffers: int = 3  # after the header
    total_bytes: int = 1 << 27  # bytes of all frames, the seal included


class SampleStamp(NamedTuple):
    """The readable part of a message about a sample."""

    run_id: str
    incarnation: int  # start of that run
    group: str
    sample_index: int
    attempt: int  # number of the lease among the group's


class _Stamp(msgspec.Struct, kw_only=True):
    schema: int


class _Sample(msgspec.Struct):
    group: Name
    sample_index: Count
    attempt: Count


class _TrajectoryStamp(msgspec.Struct):
    type: Literal["trajectory"]
    run_id: Name
    incarnation: Count
    facts: _Sample


class _FailureStamp(_Sample):
    type: Literal["failed"]
    run_id: Name
    incarnation: Count


_encoder = msgspec.msgpack.Encoder()
_stamp_decoder = msgspec.msgpack.Decoder(_Stamp)
_trajectory_decoder = msgspec.msgpack.Decoder(_TrajectoryStamp)
_failure_decoder = msgspec.msgpack.Decoder(_FailureStamp)


def seal(frames: Sequence[bytes]) -> bytes:
    """Return XXH3-64, big-endian, over each frame's length (8 bytes, little-endian) and the frame, in order.

    The lengths reveal bytes that moved over a frame's border, and an empty frame that was lost. CURVE protects a
    message between two sockets, the seal between encoder and decoder. It finds faults and stops no forger: a peer with
    a key can seal anything.
    """
    digest = xxhash.xxh3_64()
    for frame in frames:
        digest.update(len(frame).to_bytes(8, "little"))
        digest.update(frame)
    return digest.digest()


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

        Raises: FrameError with the path of the bad field ("$.facts.reward") in its text, and the reason "empty",
        "oversized", "checksum", "schema" or "invalid".
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
            raise _invalid_field(str(error)) from None
        except _NOT_DECODABLE as error:
            raise FrameError("$", f"not a message: {error}") from None


def read_refused_sample(frames: Sequence[bytes], limits: Limits) -> SampleStamp | None:
    """Return the sample of a message that no decoder accepts: its server must not send it again.

    None when the frames name no sample, or are damaged: a damaged message is sent again, and accepted then.
    """
    *content, last = frames or [b""]
    if not content or len(content[0]) > limits.header_bytes or seal(content) != last:
        return None
    for decoder in (_trajectory_decoder, _failure_decoder):
        try:
            stamp = decoder.decode(content[0])
        except _NOT_DECODABLE:
            continue
        sample = stamp.facts if isinstance(stamp, _TrajectoryStamp) else stamp
        return SampleStamp(stamp.run_id, stamp.incarnation, sample.group, sample.sample_index, sample.attempt)
    return None


# msgspec's errors end with the place: "... - at `$.facts.reward`", or "... - at `key` in `$.metrics`" for a map's key.
_WHERE = re.compile(r"(?P<text>.*) - at (?P<is_key>`key` in )?`(?P<path>.*)`", re.DOTALL)


def _invalid_field(reason: str) -> FrameError:
    found = _WHERE.fullmatch(reason)
    if found is None:
        return FrameError("$", reason)
    return FrameError(found["path"], f"{found['text']} in each key" if found["is_key"] else found["text"])


def _check_sizes(frames: Sequence[bytes], limits: Limits) -> None:
    """Raise FrameError for more frames or bytes than a message may have. The last frame is the seal."""
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
    """Return the error for frames with a wrong seal: damage, or a message of the schema without a seal."""
    try:
        if _stamp_decoder.decode(header).schema == _UNSEALED_SCHEMA:
            return _other_schema(_UNSEALED_SCHEMA)
    except _NOT_DECODABLE:
        pass
    return FrameError("$", "the frames are not the ones that were sealed: damaged on the way", "checksum")


def _other_schema(schema: int) -> FrameError:
    return FrameError(
        "$.schema",
        f"is {schema}, this process speaks {SCHEMA_VERSION}. Run the same version of Sluice everywhere",
        "schema",
    )
