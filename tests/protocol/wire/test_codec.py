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


HELLO = encode(EXAMPLES["hello"][0])[0]
TRUNCATED = "$: not a message: Input data was truncated"
OTHER_SCHEMA = "this process speaks 7. Run the same version of Sluice everywhere"


@pytest.mark.parametrize(
    ("frames", "text", "reason"),
    [
        ([], "$: no frames", "empty"),
        (sealed(b""), TRUNCATED, "invalid"),
        (sealed(HELLO[:-3]), TRUNCATED, "invalid"),
        (
            sealed(HELLO + b"\x00"),
            f"$: not a message: MessagePack data is malformed: trailing characters (byte {len(HELLO)})",
            "invalid",
        ),
        (encode(msgspec.structs.replace(EXAMPLES["hello"][0], schema=2)), f"$.schema: is 2, {OTHER_SCHEMA}", "schema"),
        (packed({"schema": 9, "type": "telepathy"}), f"$.schema: is 9, {OTHER_SCHEMA}", "schema"),
        (packed({"type": "hello"}), "$: Object missing required field `schema`", "invalid"),
        (header(type="telepathy"), "$.type: Invalid value 'telepathy'", "invalid"),
        (
            header(type="next", step=1, rank=0, colour="red"),
            "$: Object contains unknown field `colour`",
            "invalid",
        ),
        (header(type="next", step=1), "$: Object missing required field `rank`", "invalid"),
        (
            header(type="hello", server="s" * 201, policy_version=1),
            "$.server: Expected `str` of length <= 200",
            "invalid",
        ),
    ],
)
def test_decode_refuses_frames_by_the_place_of_the_fault(frames: list[bytes], text: str, reason: str) -> None:
    assert refusal(frames) == (text, reason)


@pytest.mark.parametrize(
    ("tag", "field", "value", "text"),
    [
        ("stepped", "metrics", {"": 1.0}, "$.metrics: Expected `str` of length >= 1 in each key"),
        (
            "heartbeat",
            "failures",
            {f"f{i}": 1 for i in range(257)},
            "$.failures: Expected `object` of length <= 256",
        ),
    ],
)
def test_decode_names_a_map_that_is_wrong(tag: str, field: str, value: object, text: str) -> None:
    assert refusal(packed(msgspec.to_builtins(EXAMPLES[tag][0]) | {field: value}))[0] == text


def test_decode_names_the_path_of_a_nested_field() -> None:
    body = msgspec.to_builtins(EXAMPLES["trajectory"][0])
    body["facts"]["version_spans"][1] = [5, 6, -1]
    assert refusal(packed(body))[0] == "$.facts.version_spans[1][2]: Expected `int` >= 0"


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
    head = packed({"type": "next", "schema": m.SCHEMA_VERSION, "x": None})[0][:-1]
    assert refusal(sealed(head + b"\x91" * 100_000 + b"\xc0"))[1] == "invalid"
