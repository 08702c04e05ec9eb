"""Which sample a message is of that the decoder refused."""

from typing import Any

import msgspec
import pytest

from protocol.wire.codec import Limits, SampleStamp, read_refused_sample, seal
from tests.protocol.wire.examples import STAMP

SAMPLE = {"group": "e0-aa", "sample_index": 1, "attempt": 2}
STAMPED = SampleStamp(STAMP["run_id"], STAMP["incarnation"], "e0-aa", 1, 2)
TRAJECTORY = {"type": "trajectory", "schema": 4, **STAMP, "facts": {**SAMPLE, "finish": "won", "reward": float("nan")}}
FAILURE = {"type": "failed", "schema": 4, **STAMP, **SAMPLE, "boundary": 7}


def read(message: Any, *buffers: bytes) -> SampleStamp | None:
    content = [msgspec.msgpack.encode(message), *buffers]
    return read_refused_sample([*content, seal(content)], Limits())


def test_sample_of_a_trajectory_and_of_a_failure_is_read_though_other_fields_are_wrong() -> None:
    assert read(TRAJECTORY, b"too", b"few") == STAMPED
    assert read(FAILURE) == STAMPED


@pytest.mark.parametrize(
    "message",
    [
        {**TRAJECTORY, "facts": {**SAMPLE, "sample_index": -1}},
        {**TRAJECTORY, "facts": {**SAMPLE, "group": ""}},
        {**TRAJECTORY, "facts": {"group": "e0-aa", "sample_index": 1}},
        {**TRAJECTORY, "facts": None},
        {**TRAJECTORY, "incarnation": "1"},
        {**TRAJECTORY, "type": "hello"},
        [1, 2],
        None,
    ],
)
def test_message_that_does_not_say_its_sample_is_of_none(message: Any) -> None:
    assert read(message) is None


def test_nothing_is_read_of_what_is_not_as_it_was_sealed_or_too_large() -> None:
    header = msgspec.msgpack.encode(TRAJECTORY)
    assert read_refused_sample([header, b"12345678"], Limits()) is None
    assert read_refused_sample([header, seal([header])], Limits(header_bytes=len(header) - 1)) is None
    assert read_refused_sample([header, seal([header])], Limits(header_bytes=len(header))) == STAMPED


@pytest.mark.parametrize("frames", [[], [b""], [b"garbage"], [b"\x91" * 100_000, b""]])
def test_garbage_is_of_no_sample(frames: list[bytes]) -> None:
    assert read_refused_sample(frames, Limits()) is None
    assert read_refused_sample([*frames, seal(frames)], Limits()) is None
