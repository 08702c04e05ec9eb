"""A reward service and retriever in this process's own event loop that answers each row as the row says.

It speaks just enough HTTP/1.1 to say anything: status lines, headers and bodies go out as the bytes that they are.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from tests.chaos.rig.hostile_values import Reply, Row

_ROW = re.compile(r"row (\d+):")
_GOOD_REWARD = Reply(b"200 OK", b"", b'{"rewards": [0.5]}')
_GOOD_SEARCH = Reply(b"200 OK", b"", json.dumps({"result": [['"Title"\nfound']]}).encode())


@asynccontextmanager
async def hostile_services(rows: Sequence[Row]) -> AsyncIterator[str]:
    """Yield the address of /score and /retrieve; rows are told apart by `row N:` in what is asked."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
                length = re.search(r"content-length: (\d+)", head)
                body = await reader.readexactly(int(length[1]) if length else 0)
                reply = _reply(rows, head.startswith("post /retrieve"), body.decode(errors="replace"))
                lines = b"HTTP/1.1 %s\r\ncontent-length: %d\r\n" % (reply.status, len(reply.body))
                writer.write(lines + reply.headers + b"\r\n" + reply.body)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client has gone
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=1024)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def _reply(rows: Sequence[Row], is_search: bool, body: str) -> Reply:
    found = _ROW.search(body)
    row = rows[int(found[1])] if found and int(found[1]) < len(rows) else None
    if is_search:
        return row.search if row and row.search else _GOOD_SEARCH
    return row.reward if row and row.reward else _GOOD_REWARD
