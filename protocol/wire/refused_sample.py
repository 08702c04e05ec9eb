"""Which sample a message is of that no decoder takes: its server must hear that it need not send it again.

Only a message that is whole is looked at: one that was damaged on the way is sent again, and taken then.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from protocol.wire.codec import Limits
from protocol.wire.seal import seal
from protocol.wire.trajectory import Count, Name


class SampleStamp(NamedTuple):
    """What is readable of a message about a sample."""

    run_id: str  # the run that the sender takes it for
    incarnation: int  # the start of the run that the sender takes it for
    group: str  # as in the lease
    sample_index: int  # as in the lease
    attempt: int  # of the lease that it was made for


class _Sample(msgspec.Struct):
    group: Name
    sample_index: Count
    attempt: Count


class _Trajectory(msgspec.Struct):
    type: Literal["trajectory"]
    run_id: Name
    incarnation: Count
    facts: _Sample


class _Failure(_Sample):
    type: Literal["failed"]
    run_id: Name
    incarnation: Count


_TRAJECTORY = msgspec.msgpack.Decoder(_Trajectory)
_FAILURE = msgspec.msgpack.Decoder(_Failure)


def read_refused_sample(frames: Sequence[bytes], limits: Limits) -> SampleStamp | None:
    """Return the sample that refused frames are of; None when they do not say, or are not as they were sealed."""
    *content, last = frames or [b""]
    if not content or len(content[0]) > limits.header_bytes or seal(content) != last:
        return None
    try:
        trajectory = _TRAJECTORY.decode(content[0])
        return _stamp(trajectory.run_id, trajectory.incarnation, trajectory.facts)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        pass
    try:
        failure = _FAILURE.decode(content[0])
        return _stamp(failure.run_id, failure.incarnation, failure)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _stamp(run_id: str, incarnation: int, sample: _Sample) -> SampleStamp:
    return SampleStamp(run_id, incarnation, sample.group, sample.sample_index, sample.attempt)
