"""A request's body read up to a limit, whatever its headers say."""

from collections.abc import AsyncIterator


class BodyTooLargeError(ValueError):
    """A body is over the limit: answer 413. Nothing of it was parsed, and the rest was not read."""


async def read_body(chunks: AsyncIterator[bytes], content_length: str | None, max_bytes: int) -> bytes:
    """Return the body. content_length: the header as it came; chunked bodies have none.

    Raises: BodyTooLargeError as soon as the header or the bytes read so far say so.
    """
    said = int(content_length) if content_length is not None and content_length.isdecimal() else 0
    body = bytearray()
    if said <= max_bytes:
        async for chunk in chunks:
            body += chunk
            if len(body) > max_bytes:
                break
        else:
            return bytes(body)
    raise BodyTooLargeError(f"the body is over {max_bytes} bytes")
