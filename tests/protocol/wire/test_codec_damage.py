"""Messages that were damaged on their way, by one bit or by many: refused, never read as another message."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import FrameError
from protocol.wire import messages as m
from protocol.wire.codec import encode
from tests.protocol.wire.frames import COORDINATOR, EXAMPLES, packed, refusal, sealed


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


def test_decode_refuses_bytes_that_moved_over_a_frame_s_border() -> None:
    header, tokens, logprobs, mask, last = encode(*EXAMPLES["trajectory"])
    assert refusal([header, tokens + logprobs[:4], logprobs[4:], mask, last])[1] == "checksum"


def test_decode_refuses_frames_in_another_order() -> None:
    header, tokens, logprobs, mask, last = encode(*EXAMPLES["trajectory"])
    assert refusal([header, logprobs, tokens, mask, last])[1] == "checksum"


def test_decode_refuses_an_empty_frame_that_was_lost() -> None:
    message, _ = EXAMPLES["trajectory"]
    header, *_, last = encode(message, [b"", b"", b""])
    assert refusal([header, b"", b"", last])[1] == "checksum"


def test_decode_refuses_a_message_without_seal() -> None:
    assert refusal(encode(EXAMPLES["hello"][0])[:-1])[1] == "checksum"


def test_decode_refuses_a_seal_alone() -> None:
    assert refusal(sealed()) == ("$: no header", "empty")


@pytest.mark.parametrize("tag", ["hello", "trajectory"])
def test_decode_refuses_a_message_of_the_schema_that_had_no_seal_by_name(tag: str) -> None:
    message, buffers = EXAMPLES[tag]
    first = msgspec.msgpack.encode(msgspec.structs.replace(message, schema=1))
    assert refusal([first, *buffers]) == (
        "$.schema: is 1, this process speaks 6. Run the same version of Sluice everywhere",
        "schema",
    )


@settings(max_examples=500, deadline=None)
@given(st.lists(st.binary(max_size=200), max_size=6))
def test_decode_raises_nothing_but_frame_errors_on_noise(frames: list[bytes]) -> None:
    with pytest.raises(FrameError):
        COORDINATOR.decode(frames)


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


_leaf = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=20)


@settings(max_examples=500, deadline=None)
@given(
    tag=st.sampled_from(sorted(EXAMPLES)),
    fields=st.dictionaries(
        st.sampled_from(["schema", "type", "run_id", "incarnation", "facts", "policy_version", "step", "metrics"]),
        st.recursive(_leaf, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=5), inner), max_leaves=8),
        max_size=3,
    ),
)
def test_decode_raises_nothing_but_frame_errors_on_wrong_types(tag: str, fields: dict[str, object]) -> None:
    body = msgspec.to_builtins(EXAMPLES[tag][0]) | fields
    try:
        outcome: object = COORDINATOR.decode(packed(body))[0]
    except FrameError as error:
        outcome = error.path
    assert isinstance(outcome, m.Message) or str(outcome).startswith("$")
