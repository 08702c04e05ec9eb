"""Messages that were damaged on their way, by one bit or by many: refused, never read as another message."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import FrameError
from protocol.wire.codec import encode
from tests.protocol.wire.frames import COORDINATOR, EXAMPLES, refusal, sealed


def test_decode_refuses_every_single_bit_that_flipped() -> None:
    frames = encode(*EXAMPLES["trajectory"])
    for place, frame in enumerate(frames):
        for bit in range(8 * len(frame)):
            damaged = bytearray(frame)
            damaged[bit // 8] ^= 1 << bit % 8
            text, reason = refusal([*frames[:place], bytes(damaged), *frames[place + 1 :]])
            assert (text, reason) == (
                "$: the frames are not the ones that were sealed: damaged on the way",
                "checksum",
            )


def _moved(header: bytes, tokens: bytes, logprobs: bytes, mask: bytes, last: bytes) -> list[bytes]:
    return [header, tokens + logprobs[:4], logprobs[4:], mask, last]


def _swapped(header: bytes, tokens: bytes, logprobs: bytes, mask: bytes, last: bytes) -> list[bytes]:
    return [header, logprobs, tokens, mask, last]


@pytest.mark.parametrize(
    "frames",
    [
        _moved(*encode(*EXAMPLES["trajectory"])),
        _swapped(*encode(*EXAMPLES["trajectory"])),
        [frame for i, frame in enumerate(encode(EXAMPLES["trajectory"][0], [b"", b"", b""])) if i != 1],
        encode(EXAMPLES["hello"][0])[:-1],
    ],
    ids=["moved over a border", "in another order", "an empty frame lost", "without a seal"],
)
def test_decode_refuses_frames_that_are_not_as_they_were_sealed(frames: list[bytes]) -> None:
    assert refusal(frames)[1] == "checksum"


def test_decode_refuses_a_seal_alone() -> None:
    assert refusal(sealed()) == ("$: no header", "empty")


@pytest.mark.parametrize("tag", ["hello", "trajectory"])
def test_decode_refuses_a_message_of_the_schema_that_had_no_seal_by_name(tag: str) -> None:
    message, buffers = EXAMPLES[tag]
    first = msgspec.msgpack.encode(msgspec.structs.replace(message, schema=1))
    assert refusal([first, *buffers]) == (
        "$.schema: is 1, this process speaks 7. Run the same version of Sluice everywhere",
        "schema",
    )


@settings(max_examples=1000, deadline=None)
@given(
    tag=st.sampled_from(sorted(EXAMPLES)),
    place=st.integers(0, 10_000),
    junk=st.binary(min_size=1, max_size=4),
    cut=st.integers(0, 3),
)
def test_decode_raises_nothing_but_frame_errors_on_damaged_messages(
    tag: str, place: int, junk: bytes, cut: int
) -> None:
    frame, *buffers = encode(*EXAMPLES[tag])[:-1]
    at = place % len(frame)
    damaged = frame[:at] + junk + frame[at + cut :]
    try:
        message, _ = COORDINATOR.decode(sealed(damaged, *buffers))
    except FrameError:
        return
    # What still is a message has its types: it can be written again.
    assert COORDINATOR.decode(encode(message, buffers))[0] == message or "nan" in repr(message)


MIB = 1 << 20


def refusal_of_zeros(*sizes: int) -> tuple[str, str]:
    """Return the text and the reason with which frames of these sizes are refused: all zeros, so no seal fits them."""
    return refusal([bytes(size) for size in sizes])


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ([MIB + 1, 8], "$: header of 1048577 bytes, at most 1048576"),
        ([1, 64 * MIB + 1, 8], "$[0]: buffer of 67108865 bytes, at most 67108864"),
        ([1, 0, 64 * MIB, 64 * MIB, 8], "$: 134217737 bytes, at most 134217728"),
        ([1, 0, 0, 0, 0, 8], "$: 4 buffers, at most 3"),
    ],
    ids=["header", "buffer", "total", "number"],
)
def test_message_larger_than_it_may_be_is_refused_before_its_seal_is_looked_at(sizes: list[int], text: str) -> None:
    assert refusal_of_zeros(*sizes) == (text, "oversized")


@pytest.mark.parametrize(
    "sizes",
    [[MIB, 8], [1, 64 * MIB, 8], [1, 0, 64 * MIB, 64 * MIB - 9, 8]],
    ids=["header", "buffer", "total"],
)
def test_message_as_large_as_it_may_be_is_not_refused_for_its_size(sizes: list[int]) -> None:
    assert refusal_of_zeros(*sizes)[1] == "checksum"
