"""Values and depth of a header, counted without making one of them: against a count of what the decoder makes."""

from datetime import UTC
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import FrameError
from protocol.wire.header_shape import check_shape


def count(value: Any) -> int:
    """Return the number of values in a value, itself and keys included."""
    if isinstance(value, dict):
        return 1 + sum(count(key) + count(inner) for key, inner in value.items())
    return 1 + sum(map(count, value)) if isinstance(value, list) else 1


def depth(value: Any) -> int:
    """Return how many containers with contents stand inside each other."""
    inside = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return 1 + max(map(depth, inside)) if inside else 0


def refusal(packed: bytes, **limits: int) -> tuple[str, str]:
    with pytest.raises(FrameError) as caught:
        check_shape(packed, **limits)
    return str(caught.value), caught.value.reason


_leaf = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=300)
    | st.binary(max_size=300)
    | st.datetimes(timezones=st.just(UTC))
)
_values = st.recursive(
    _leaf,
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=40), inner, max_size=20),
    max_leaves=60,
)


@settings(max_examples=150, deadline=None)
@given(_values)
def test_check_shape_counts_what_the_decoder_would_make(value: Any) -> None:
    packed = msgspec.msgpack.encode(value)
    check_shape(packed, max_values=count(value), max_depth=depth(value))
    assert refusal(packed, max_values=count(value) - 1)[0] == f"$: holds more than {count(value) - 1} values"
    if depth(value):
        assert refusal(packed, max_depth=depth(value) - 1)[0] == f"$: nests deeper than {depth(value) - 1}"


@pytest.mark.parametrize("number", [0, 15, 16, 40, 70_000])
def test_check_shape_counts_long_containers(number: int) -> None:
    packed = msgspec.msgpack.encode({str(i): [i] for i in range(number)})
    check_shape(packed, max_values=3 * number + 1)
    assert refusal(packed, max_values=3 * number)[1] == "oversized"


def test_check_shape_refuses_a_declared_length_before_its_contents_are_there() -> None:
    assert refusal(b"\xdd\xff\xff\xff\xff") == ("$: holds more than 65536 values", "oversized")


# One value of every kind that MessagePack has besides containers, the long forms of short values included.
_KINDS = {
    "nil": b"\xc0",
    "false": b"\xc2",
    "true": b"\xc3",
    "positive fixint": b"\x7f",
    "negative fixint": b"\xe0",
    "float32": b"\xca\x3f\x80\x00\x00",
    "float64": b"\xcb\x3f\xf0" + bytes(6),
    **{f"uint{8 << i}": bytes([0xCC + i]) + bytes(1 << i) for i in range(4)},
    **{f"int{8 << i}": bytes([0xD0 + i]) + bytes(1 << i) for i in range(4)},
    **{f"fixext{1 << i}": bytes([0xD4 + i, 7]) + bytes(1 << i) for i in range(5)},
    **{f"ext{8 << i}": bytes([0xC7 + i]) + (3).to_bytes(1 << i, "big") + b"\x07abc" for i in range(3)},
    **{f"bin{8 << i}": bytes([0xC4 + i]) + (3).to_bytes(1 << i, "big") + b"abc" for i in range(3)},
    **{f"str{8 << i}": bytes([0xD9 + i]) + (3).to_bytes(1 << i, "big") + b"abc" for i in range(3)},
    "fixstr": b"\xbf" + b"a" * 31,
}


@pytest.mark.parametrize("kind", _KINDS)
def test_check_shape_steps_over_every_kind_of_value_to_the_one_behind_it(kind: str) -> None:
    packed = b"\x92" + _KINDS[kind] + b"\x93\x01\x02\x03"
    assert msgspec.msgpack.decode(packed)[1] == [1, 2, 3]
    check_shape(packed, max_values=6)
    assert refusal(packed, max_values=5)[1] == "oversized"


@pytest.mark.parametrize("packed", [b"", b"\xc1", b"\xdd\x00", b"\x93\x01", b"\xdb\xff\xff\xff\xff", b"\xc7"])
def test_check_shape_leaves_what_is_cut_short_to_the_decoder(packed: bytes) -> None:
    check_shape(packed)
    with pytest.raises((msgspec.DecodeError, UnicodeDecodeError)):
        msgspec.msgpack.decode(packed)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_check_shape_ends_on_any_bytes(noise: bytes) -> None:
    try:
        outcome = check_shape(noise) or "passed"
    except FrameError as error:
        outcome = error.reason
    assert outcome in ("passed", "oversized")
