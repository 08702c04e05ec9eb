"""The messages' bytes are a contract: committed golden frames, and the rule by which a field may be added."""

from pathlib import Path
from typing import get_args

import msgspec
import pytest

from protocol.errors import FrameError
from protocol.wire import messages as m
from protocol.wire.codec import Decoder, encode
from tests.protocol.wire.examples import STAMP, example_messages, example_part, part_buffers

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


@pytest.mark.parametrize(("num_parts", "is_taken"), [(32, True), (33, False)])
def test_turns_of_at_most_32_samples_come_in_one_message(num_parts: int, is_taken: bool) -> None:
    decoder: Decoder[m.Message] = Decoder(m.ToCoordinator)
    frames = encode(m.TurnsDone(**STAMP, parts=[example_part()] * num_parts), part_buffers())
    if is_taken:
        assert decoder.decode(frames)[0].parts == [example_part()] * num_parts  # type: ignore[attr-defined]
    else:
        with pytest.raises(FrameError, match=r"parts: Expected `array` of length <= 32"):
            decoder.decode(frames)


def test_a_part_may_hold_as_many_tokens_as_a_message() -> None:
    decoder: Decoder[m.Message] = Decoder(m.ToCoordinator)
    part = example_part(num_tokens=100_000)
    message, _ = decoder.decode(encode(m.TurnsDone(**STAMP, parts=[part]), part_buffers()))
    assert message.parts == [part]  # type: ignore[attr-defined]
