"""Bodies are bounded by what was read, whatever the header says."""

from collections.abc import AsyncIterator

import pytest

from protocol.http.app import BodyTooLargeError, read_body


class Chunks:
    """A body in chunks of 10 bytes, and how many of them were read."""

    def __init__(self, number: int) -> None:
        self.num_read = 0
        self._number = number

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for _ in range(self._number):
            self.num_read += 1
            yield b"0123456789"


@pytest.mark.parametrize("content_length", ["100", "7", None, "x"])
async def test_body_up_to_the_limit_is_returned_whole(content_length: str | None) -> None:
    assert await read_body(aiter(Chunks(10)), content_length, 100) == b"0123456789" * 10


@pytest.mark.parametrize("content_length", ["7", None])
async def test_body_over_the_limit_is_read_no_further(content_length: str | None) -> None:
    chunks = Chunks(1000)
    with pytest.raises(BodyTooLargeError, match="the body is over 100 bytes"):
        await read_body(aiter(chunks), content_length, 100)
    assert chunks.num_read == 11


async def test_body_is_not_read_when_its_header_says_that_it_is_too_large() -> None:
    chunks = Chunks(1)
    with pytest.raises(BodyTooLargeError):
        await read_body(aiter(chunks), "101", 100)
    assert chunks.num_read == 0
