"""Bodies are bounded by what was read, whatever the header says."""

from typing import Any

import pytest
from fastapi import Request

from protocol.http.app import BodyTooLargeError, read_body


class Chunks:
    """A request with a body in chunks of 10 bytes, and how many of them were read."""

    def __init__(self, number: int, content_length: str | None) -> None:
        self.num_read = 0
        self._number = number
        headers = [] if content_length is None else [(b"content-length", content_length.encode())]
        self.request = Request({"type": "http", "headers": headers}, self._receive)

    async def _receive(self) -> dict[str, Any]:
        self.num_read += 1
        return {"type": "http.request", "body": b"0123456789", "more_body": self.num_read < self._number}


@pytest.mark.parametrize("content_length", ["100", "7", None, "x"])
async def test_body_up_to_the_limit_is_returned_whole(content_length: str | None) -> None:
    assert await read_body(Chunks(10, content_length).request, 100) == b"0123456789" * 10


@pytest.mark.parametrize("content_length", ["7", None])
async def test_body_over_the_limit_is_read_no_further(content_length: str | None) -> None:
    chunks = Chunks(1000, content_length)
    with pytest.raises(BodyTooLargeError, match="the body is over 100 bytes"):
        await read_body(chunks.request, 100)
    assert chunks.num_read == 11


async def test_body_is_not_read_when_its_header_says_that_it_is_too_large() -> None:
    chunks = Chunks(1, "101")
    with pytest.raises(BodyTooLargeError):
        await read_body(chunks.request, 100)
    assert chunks.num_read == 0
