"""The messages' bytes are a contract: committed golden frames, and the rule by which a field may be added."""

from pathlib import Path
from typing import get_args

import msgspec
import pytest

from protocol.errors import FrameError
from protocol.wire import messages as m
from protocol.wire.codec import Decoder, encode
from tests.protocol.wire.examples import STAMP, example_messages, example_part, part_buffers
from tests.protocol.wire.make_golden import schema

EXAMPLES = example_messages()
GOLDEN = Path(__file__).parent / "golden"
EVERY = m.ToCoordinator | m.ToServer | m.ToRank


def golden_frames(tag: str) -> list[bytes]:
    return [bytes.fromhex(line) for line in (GOLDEN / f"{tag}.hex").read_text(encoding="ascii").splitlines()]


def test_every_message_has_an_example_and_golden_bytes() -> None:
    tags = {msgspec.inspect.type_info(kind).tag for kind in get_args(EVERY)}  # type: ignore[attr-defined]
    assert tags == set(EXAMPLES) == {path.stem for path in GOLDEN.glob("*.hex")}


@pytest.mark.parametrize("tag", sorted(EXAMPLES))
def test_message_is_written_as_its_golden_bytes(tag: str) -> None:
    assert encode(*EXAMPLES[tag]) == golden_frames(tag)


@pytest.mark.parametrize("tag", sorted(EXAMPLES))
def test_golden_bytes_are_read_as_the_message(tag: str) -> None:
    decoder: Decoder[m.Message] = Decoder(EVERY)
    assert decoder.decode(golden_frames(tag)) == EXAMPLES[tag]


def test_limits_and_defaults_are_those_of_the_committed_schema() -> None:
    # A field may be added with a default; any other change raises SCHEMA_VERSION, which is in the schema.
    assert schema() == (GOLDEN / "schema.txt").read_text(encoding="ascii").splitlines()


class LaterNext(m.Message, frozen=True, kw_only=True, tag="next"):
    """NextBatch as it would be with one more field."""

    step: int
    rank: int
    node: str = "any"


def test_an_added_field_with_a_default_reads_older_bytes() -> None:
    decoder: Decoder[LaterNext] = Decoder(LaterNext)
    message, _ = decoder.decode(golden_frames("next"))
    assert message == LaterNext(**STAMP, step=3, rank=0, node="any")


def test_an_added_field_is_refused_by_an_older_reader() -> None:
    decoder: Decoder[m.Message] = Decoder(m.ToCoordinator)
    with pytest.raises(FrameError, match=r"^\$: Object contains unknown field `node`$"):
        decoder.decode(encode(LaterNext(**STAMP, step=3, rank=0)))


def test_messages_do_not_change() -> None:
    with pytest.raises(AttributeError, match="immutable"):
        EXAMPLES["done"][0].run_id = "other"  # type: ignore[misc]


def test_a_part_may_hold_as_many_tokens_as_a_message() -> None:
    decoder: Decoder[m.Message] = Decoder(m.ToCoordinator)
    part = example_part(num_tokens=100_000)
    message, _ = decoder.decode(encode(m.TurnsDone(**STAMP, parts=[part]), part_buffers()))
    assert message.parts == [part]  # type: ignore[attr-defined]
