"""Clients of an HTTP service for benchmarks, over plain sockets.

httpx, and asyncio's own loop, would take more processor time than the service, and be late themselves. A request is
made before the first is sent.
"""

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import uvloop


@dataclass
class Outcome:
    """What clients saw."""

    seconds: list[float] = field(default_factory=list)  # of each request answered 200
    refused_seconds: list[float] = field(default_factory=list)  # of each one answered 503
    others: list[int] = field(default_factory=list)  # statuses of the rest
    answers: dict[int, bytes] = field(default_factory=dict)  # number of a request -> body, of each answered 200
    took_s: float = 0.0  # from the first request to the last answer

    @property
    def asked_per_s(self) -> float:
        """Requests sent in a second."""
        return (len(self.seconds) + len(self.refused_seconds) + len(self.others)) / self.took_s

    @property
    def rate(self) -> float:
        """Requests answered 200 in a second."""
        return len(self.seconds) / self.took_s


def load(url: str, body_of: Callable[[int], Any], num_clients: int, num_requests: int, pause_s: float = 0.0) -> Outcome:
    """Return what num_clients saw who post body_of(0), body_of(1), .. one after the other, num_requests in all.

    pause_s: how long a client waits that was answered 503, before it asks the same again: from half to half as much
    again, as clients do that shall not come back together.
    """
    return uvloop.run(_load(url, body_of, num_clients, num_requests, pause_s))


async def _load(
    url: str, body_of: Callable[[int], Any], num_clients: int, num_requests: int, pause_s: float
) -> Outcome:
    parts = urlsplit(url)
    made = [_request(parts.netloc, parts.path or "/", body_of(number)) for number in range(num_requests)]
    requests = enumerate(made)
    loop, outcome = asyncio.get_running_loop(), Outcome()
    clients = [_Client(requests, outcome, pause_s) for _ in range(num_clients)]
    for client in clients:
        await loop.create_connection(lambda client=client: client, parts.hostname, parts.port)  # type: ignore[misc]
    started = time.perf_counter()
    for client in clients:
        client.ask()
    await asyncio.gather(*(client.done for client in clients))
    outcome.took_s = time.perf_counter() - started
    return outcome


def _request(host: str, path: str, body: Any) -> bytes:
    encoded = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(encoded)}\r\n"
    return f"{head}content-type: application/json\r\n\r\n".encode() + encoded


class _Client(asyncio.Protocol):
    """One connection, that asks again as soon as it is answered."""

    def __init__(self, requests: Iterator[tuple[int, bytes]], outcome: Outcome, pause_s: float) -> None:
        self._requests, self._outcome, self._pause_s = requests, outcome, pause_s
        self._loop = asyncio.get_running_loop()
        self._answer = bytearray()
        self._asked = 0.0
        self._request: tuple[int, bytes] | None = None
        self.done: asyncio.Future[None] = self._loop.create_future()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def ask(self) -> None:
        self._request = next(self._requests, None)
        if self._request is not None:
            self._ask_again()
        else:
            self.done.set_result(None)
            self._transport.close()

    def _ask_again(self) -> None:
        assert self._request is not None
        self._asked = time.perf_counter()
        self._transport.write(self._request[1])

    def data_received(self, data: bytes) -> None:
        self._answer += data
        end = self._answer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self._answer[:end]).lower() + b"\r\n"
        if len(self._answer) < end + 4 + int(head.split(b"content-length:")[1].split(b"\r\n")[0]):
            return
        status, body = int(head.split()[1]), bytes(self._answer[end + 4 :])
        self._answer.clear()
        self._note(status, time.perf_counter() - self._asked, body)

    def _note(self, status: int, seconds: float, body: bytes) -> None:
        if status == 503:
            self._outcome.refused_seconds.append(seconds)
            self._loop.call_later(self._pause_s * random.uniform(0.5, 1.5), self._ask_again)
            return
        if status == 200:
            self._outcome.seconds.append(seconds)
            assert self._request is not None
            self._outcome.answers[self._request[0]] = body
        else:
            self._outcome.others.append(status)
        self.ask()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or ConnectionError("the service closed a connection"))


def percentile(seconds: list[float], share: float) -> float:
    """Return the value that `share` of them do not exceed; 0 where there are none."""
    ranked = sorted(seconds)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))] if ranked else 0.0
