"""Clients of an HTTP service for benchmarks, over plain sockets.

httpx would take more processor time than the service.
"""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Outcome:
    """What clients saw."""

    seconds: list[float] = field(default_factory=list)  # of each request answered 200
    refused_seconds: list[float] = field(default_factory=list)  # of each one answered 503
    others: list[int] = field(default_factory=list)  # statuses of the rest
    took_s: float = 0.0  # from the first request to the last answer

    @property
    def rate(self) -> float:
        """Requests answered 200 in a second."""
        return len(self.seconds) / self.took_s


async def load(url: str, body_of: Callable[[int], Any], num_clients: int, num_requests: int) -> Outcome:
    """Return what num_clients saw who post body_of(0), body_of(1), .. one after the other, num_requests in all."""
    outcome, numbers = Outcome(), iter(range(num_requests))
    started = time.perf_counter()
    await asyncio.gather(*(_client(url, body_of, numbers, outcome) for _ in range(num_clients)))
    outcome.took_s = time.perf_counter() - started
    return outcome


async def _client(url: str, body_of: Callable[[int], Any], numbers: Any, outcome: Outcome) -> None:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    for number in numbers:
        body = json.dumps(body_of(number)).encode()
        head = f"POST {parts.path or '/'} HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-length: {len(body)}\r\n"
        asked = time.perf_counter()
        writer.write(f"{head}content-type: application/json\r\n\r\n".encode() + body)
        status = await _status(reader)
        seconds = time.perf_counter() - asked
        if status == 200:
            outcome.seconds.append(seconds)
        elif status == 503:
            outcome.refused_seconds.append(seconds)
        else:
            outcome.others.append(status)
    writer.close()


async def _status(reader: asyncio.StreamReader) -> int:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = int(head.split("content-length:")[1].split("\r\n")[0])
    await reader.readexactly(length)
    return int(head.split()[1])


def percentile(seconds: list[float], share: float) -> float:
    """Return the value that `share` of them do not exceed; 0 where there are none."""
    ranked = sorted(seconds)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))] if ranked else 0.0
