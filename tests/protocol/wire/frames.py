"""Frames that a peer might send, and what the decoder says of them."""

import msgspec
import pytest

from protocol.errors import FrameError
from protocol.wire import messages as m
from protocol.wire.codec import Decoder, seal
from tests.protocol.wire.examples import STAMP, example_messages

EXAMPLES = example_messages()


COORDINATOR: Decoder[m.Message] = Decoder(m.ToCoordinator)


def refusal(frames: list[bytes], decoder: Decoder[m.Message] = COORDINATOR) -> tuple[str, str]:
    """Return the text and the reason with which frames are refused."""
    with pytest.raises(FrameError) as caught:
        decoder.decode(frames)
    return str(caught.value), caught.value.reason


def sealed(*frames: bytes) -> list[bytes]:
    """Return frames as their sender would have sealed them, whatever they hold."""
    return [*frames, seal(frames)]


def packed(value: object) -> list[bytes]:
    return sealed(msgspec.msgpack.encode(value))


def header(**fields: object) -> list[bytes]:
    return packed({"schema": m.SCHEMA_VERSION, **STAMP, **fields})
