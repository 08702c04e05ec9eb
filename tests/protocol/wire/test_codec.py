"""Frames on the wire: golden bytes, limits, and errors that name the field."""

from typing import get_args

import msgspec
import pytest
from msgspec import inspect

from protocol.wire import messages as m
from protocol.wire.codec import Decoder, Limits, encode, seal
from tests.protocol.wire.frames import EXAMPLES, header, packed, refusal, sealed


@pytest.mark.parametrize("tag", sorted(EXAMPLES))
def test_decode_returns_what_encode_was_given(tag: str) -> None:
    message, buffers = EXAMPLES[tag]
    every: Decoder[m.Message] = Decoder(m.ToCoordinator | m.ToServer | m.ToRank)
    assert every.decode(encode(message, buffers)) == (message, buffers)


def test_decode_refuses_a_message_of_the_other_direction() -> None:
    assert refusal(encode(EXAMPLES["ack"][0])) == ("$.type: Invalid value 'ack'", "invalid")


def test_decode_refuses_no_frames() -> None:
    assert refusal([]) == ("$: no frames", "empty")


def test_decode_refuses_an_empty_header() -> None:
    assert refusal(sealed(b"")) == ("$: not a message: Input data was truncated", "invalid")


def test_decode_refuses_a_truncated_header() -> None:
    frame = encode(EXAMPLES["hello"][0])[0]
    assert refusal(sealed(frame[:-3])) == ("$: not a message: Input data was truncated", "invalid")


def test_decode_refuses_trailing_bytes() -> None:
    frame = encode(EXAMPLES["hello"][0])[0]
    assert refusal(sealed(frame + b"\x00")) == (
        f"$: not a message: MessagePack data is malformed: trailing characters (byte {len(frame)})",
        "invalid",
    )


def test_decode_refuses_another_schema_by_name() -> None:
    frame = encode(msgspec.structs.replace(EXAMPLES["hello"][0], schema=2))
    assert refusal(frame) == (
        "$.schema: is 2, this process speaks 6. Run the same version of Sluice everywhere",
        "schema",
    )


def test_decode_names_another_schema_when_the_type_is_unknown_too() -> None:
    assert refusal(packed({"schema": 9, "type": "telepathy"}))[1] == "schema"


def test_decode_refuses_a_header_without_schema() -> None:
    assert refusal(packed({"type": "hello"})) == (
        "$: Object missing required field `schema`",
        "invalid",
    )


def test_decode_refuses_an_unknown_type() -> None:
    assert refusal(header(type="telepathy"))[0] == "$.type: Invalid value 'telepathy'"


def test_decode_refuses_an_extra_key() -> None:
    text, _ = refusal(header(type="next", step=1, rank=0, colour="red"))
    assert text == "$: Object contains unknown field `colour`"


def test_decode_names_a_missing_field() -> None:
    assert refusal(header(type="next", step=1))[0] == "$: Object missing required field `rank`"


def test_decode_names_the_map_that_has_a_wrong_key() -> None:
    body = msgspec.to_builtins(EXAMPLES["stepped"][0]) | {"metrics": {"": 1.0}}
    assert refusal(packed(body))[0] == "$.metrics: Expected `str` of length >= 1 in each key"


def test_decode_names_the_path_of_a_nested_field() -> None:
    body = msgspec.to_builtins(EXAMPLES["trajectory"][0])
    body["facts"]["version_spans"][1] = [5, 6, -1]
    text, _ = refusal(packed(body))
    assert text == "$.facts.version_spans[1][2]: Expected `int` >= 0"


def test_decode_refuses_a_name_that_is_too_long() -> None:
    text, _ = refusal(header(type="hello", server="s" * 201, policy_version=1))
    assert text == "$.server: Expected `str` of length <= 200"


def test_decode_refuses_an_oversized_header() -> None:
    small: Decoder[m.Message] = Decoder(m.ToCoordinator, Limits(header_bytes=10))
    assert refusal([b"x" * 11], small) == ("$: header of 11 bytes, at most 10", "oversized")


def test_decode_refuses_an_oversized_buffer() -> None:
    small: Decoder[m.Message] = Decoder(m.ToCoordinator, Limits(buffer_bytes=10))
    frames = [encode(EXAMPLES["hello"][0])[0], b"", b"x" * 11, b""]
    assert refusal(frames, small) == ("$[1]: buffer of 11 bytes, at most 10", "oversized")


def test_decode_refuses_too_many_buffers() -> None:
    frames = [*encode(EXAMPLES["hello"][0]), b"", b"", b"", b""]
    assert refusal(frames) == ("$: 4 buffers, at most 3", "oversized")


def test_decode_refuses_a_map_that_is_too_long() -> None:
    failures = {f"f{i}": 1 for i in range(257)}
    beat = msgspec.to_builtins(EXAMPLES["heartbeat"][0]) | {"failures": failures}
    assert refusal(packed(beat))[0] == "$.failures: Expected `object` of length <= 256"


def test_decode_refuses_more_bytes_than_a_message_may_have() -> None:
    small: Decoder[m.Message] = Decoder(m.ToCoordinator, Limits(total_bytes=100))
    assert refusal([b"x" * 60, b"y" * 33, b"s" * 8], small) == ("$: 101 bytes, at most 100", "oversized")


def test_decode_refuses_a_header_of_more_values_than_its_limit() -> None:
    bomb = packed({"schema": m.SCHEMA_VERSION, "columns": [[] for _ in range(1 << 16)]})
    assert refusal(bomb) == ("$: holds more than 65536 values", "oversized")


@pytest.mark.parametrize("tag", sorted(EXAMPLES))
def test_decode_refuses_a_message_with_a_buffer_too_many(tag: str) -> None:
    message, buffers = EXAMPLES[tag]
    every: Decoder[m.Message] = Decoder(m.ToCoordinator | m.ToServer | m.ToRank, Limits(num_buffers=9))
    text, reason = refusal(encode(message, [*buffers, b"more"]), every)
    assert (text, reason) == (f"$: {len(buffers) + 1} buffers, expected {len(buffers)}", "invalid")


@pytest.mark.parametrize("name", ["started_at", "finished_at", "generate_s", "environment_s", "reward_s"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_decode_refuses_a_time_that_is_none(name: str, value: float) -> None:
    # As NaN it would be NULL in the ledger, whose columns refuse it by an error that ends the coordinator.
    body = msgspec.to_builtins(EXAMPLES["trajectory"][0])
    body["facts"][name] = value
    text, reason = refusal([*(frames := [msgspec.msgpack.encode(body), b"", b"", b""]), seal(frames)])
    assert (text[: len(name) + 8], reason) == (f"$.facts.{name}", "invalid")


def test_every_list_map_and_text_of_a_message_is_bounded() -> None:
    unbounded = []
    seen: set[type] = set()

    def look(kind: object, path: str) -> None:
        match kind:
            case inspect.StructType():
                if kind.cls not in seen:
                    seen.add(kind.cls)
                    for field in kind.fields:
                        look(field.type, f"{path}.{field.name}")
            case inspect.ListType() | inspect.DictType() | inspect.StrType() | inspect.VarTupleType():
                if kind.max_length is None:
                    unbounded.append(path)
                for part in ("item_type", "key_type", "value_type"):
                    look(getattr(kind, part, None), f"{path}.{part}")
            case inspect.UnionType():
                for part in kind.types:
                    look(part, path)
            case inspect.IntType() | inspect.FloatType():
                if kind.ge is None and not path.endswith(_MAY_BE_NEGATIVE):
                    unbounded.append(path)

    for kind in get_args(m.ToCoordinator | m.ToServer | m.ToRank):
        look(inspect.type_info(kind), kind.__name__)
    assert unbounded == []
    assert len(seen) >= 20


# The schema is compared before anything; rewards are judged by `Trajectory.check`; metrics are a rank's own.
_MAY_BE_NEGATIVE = (
    *("schema", ".reward", ".reward_score"),
    *("reward_parts.value_type", "reward_logs.value_type", "metrics.value_type"),
)


# -- the seal ---------------------------------------------------------------------------------------------------------


def test_decode_refuses_deep_nesting() -> None:
    assert refusal(sealed(b"\x91" * 100_000 + b"\xc0")) == ("$: nests deeper than 32", "oversized")
    assert refusal(sealed(b"\x91" * 4000 + b"\xc0"))[1] == "invalid"
