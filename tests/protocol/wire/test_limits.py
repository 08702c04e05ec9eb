"""The sizes that a message may have when nobody sets others: taken at the bound, refused behind it."""

import pytest

from protocol.errors import FrameError
from protocol.wire import messages as m
from protocol.wire.codec import Decoder

MIB = 1 << 20
DECODER: Decoder[m.Message] = Decoder(m.ToCoordinator)


def refusal(*sizes: int) -> tuple[str, str]:
    """Return the text and the reason with which frames of these sizes are refused: all zeros, so no seal fits them."""
    with pytest.raises(FrameError) as caught:
        DECODER.decode([bytes(size) for size in sizes])
    return str(caught.value), caught.value.reason


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
    assert refusal(*sizes) == (text, "oversized")


@pytest.mark.parametrize(
    "sizes",
    [[MIB, 8], [1, 64 * MIB, 8], [1, 0, 64 * MIB, 64 * MIB - 9, 8]],
    ids=["header", "buffer", "total"],
)
def test_message_as_large_as_it_may_be_is_not_refused_for_its_size(sizes: list[int]) -> None:
    assert refusal(*sizes)[1] == "checksum"
