"""503 from a request's bytes, and the common way for all that is not plainly such a request; over sockets."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import uvicorn

from protocol.http.admission import Admission
from protocol.http.app import Receive, Scope, Send
from protocol.http.bearer import BearerGate
from protocol.http.listen import bind
from protocol.http.turn_away import TurnAway, TurnAwayMiddleware, turning_away

TOKEN = "a-token-of-this-test"
BODY = b'{"queries": ["a"]}'
HEAD = b"POST /retrieve HTTP/1.1\r\nhost: a\r\nAuthorization: Bearer " + TOKEN.encode() + b"\r\n"
REQUEST = HEAD + b"Content-Length: 18\r\n\r\n" + BODY


class Service:
    """A service with one place, its 503s counted; what its application was asked is kept."""

    def __init__(self) -> None:
        self.num_refused = 0
        self.asked: list[str] = []
        self.admission = Admission(1, 10.0)
        self.turn_away = TurnAway("/retrieve", self.admission, "come back later", 7, self._count)

    def _count(self) -> None:
        self.num_refused += 1

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.asked.append(scope["path"])
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def connection(service: Service) -> Iterator[socket.socket]:
    listener = bind("test", "127.0.0.1", 0)
    listener.listen()
    gate = BearerGate(TurnAwayMiddleware(service.app, service.turn_away), TOKEN)
    http = turning_away(service.turn_away, TOKEN)
    server = uvicorn.Server(uvicorn.Config(gate, http=http, log_level="critical", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        with socket.create_connection(listener.getsockname(), timeout=30) as connection:
            yield connection
    finally:
        server.should_exit = True
        thread.join(60)


def _answer(connection: socket.socket, *sent: bytes) -> tuple[int, bytes]:
    """Return the status and the whole answer to what was sent, part after part."""
    for part in sent:
        connection.sendall(part)
    answer = b""
    while b"\r\n\r\n" not in answer:
        got = connection.recv(4096)
        assert got, answer
        answer += got
    head, _, body = answer.partition(b"\r\n\r\n")
    length = head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
    while length and len(body) < int(length):
        body += connection.recv(4096)
    return int(head.split()[1]), head + b"\r\n\r\n" + body


def test_a_full_service_answers_503_from_the_bytes_and_takes_the_next_request(
    service: Service, connection: socket.socket
) -> None:
    with service.admission.under_way():
        for number in range(1, 4):
            status, answer = _answer(connection, REQUEST)
            assert (status, service.num_refused) == (503, number)
            assert b"\r\nretry-after: 7\r\n" in answer
            assert answer.endswith(b'\r\n\r\n{"detail":"come back later"}')
        assert _answer(connection, b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")[0] == 200
    assert _answer(connection, REQUEST)[0] == 200
    assert (service.asked, service.num_refused) == (["/health", "/retrieve"], 3)


@pytest.mark.parametrize(
    "request_bytes",
    [
        HEAD + b"content-length: 18\r\nconnection: close\r\n\r\n" + BODY,
        HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\ncontent-length: 0\r\n\r\n",
        HEAD + b"content-length: 18\r\nexpect: 100-continue\r\n\r\n" + BODY,
    ],
)
def test_what_is_no_plain_request_meets_the_same_question_in_the_application(
    service: Service, connection: socket.socket, request_bytes: bytes
) -> None:
    with service.admission.under_way():
        status, _ = _answer(connection, request_bytes)
    assert status in (400, 503)
    assert service.asked == []


def test_two_lengths_that_differ_are_no_request(service: Service, connection: socket.socket) -> None:
    with service.admission.under_way():
        lengths = b"Content-Length: 18\r\nContent-Length: 19\r\n\r\n"
        assert _answer(connection, HEAD + lengths + BODY)[0] == 400
    assert service.num_refused == 0


def test_a_request_in_parts_and_two_in_one_are_each_answered_once(service: Service, connection: socket.socket) -> None:
    with service.admission.under_way():
        assert _answer(connection, REQUEST[:30], REQUEST[30:-5], REQUEST[-5:])[0] == 503
        connection.sendall(REQUEST + REQUEST)
        answers = b""
        while answers.count(b"come back later") < 2:
            got = connection.recv(4096)
            assert got, answers
            answers += got
    assert (answers.count(b"HTTP/1.1 503"), service.num_refused, service.asked) == (2, 3, [])


@pytest.mark.parametrize("token", [b"", b"Authorization: Bearer another-token-of-this\r\n"])
def test_who_brings_no_token_is_not_told_that_the_service_is_full(
    service: Service, connection: socket.socket, token: bytes
) -> None:
    request = b"POST /retrieve HTTP/1.1\r\nhost: a\r\n" + token + b"content-length: 18\r\n\r\n" + BODY
    with service.admission.under_way():
        assert _answer(connection, request)[0] == 401
    assert (service.num_refused, service.asked) == (0, [])


class Several:
    """Connections to one service, in this test's own event loop."""

    def __init__(self, service: Service, num_connections: int) -> None:
        gate = BearerGate(TurnAwayMiddleware(service.app, service.turn_away), TOKEN)
        config = uvicorn.Config(gate, log_level="critical", lifespan="off")
        config.load()
        protocol = turning_away(service.turn_away, TOKEN)
        self.state = uvicorn.server.ServerState()
        self.wires = [Wire() for _ in range(num_connections)]
        self.connections = [protocol(config, self.state, {}) for _ in self.wires]
        for connection, wire in zip(self.connections, self.wires, strict=True):
            connection.connection_made(wire)  # type: ignore[arg-type]  # what the protocol needs of a transport

    @property
    def statuses(self) -> list[bytes]:
        return [wire.sent[9:12] for wire in self.wires]

    async def turns(self) -> None:
        """Let all begin and end that can."""
        for _ in range(20):
            await asyncio.sleep(0)
        await asyncio.gather(*self.state.tasks)
        for connection in self.connections:
            connection._unset_keepalive_if_required()


async def test_requests_that_come_in_one_turn_of_the_loop_are_counted_before_they_are_begun(service: Service) -> None:
    several = Several(service, 2)
    for connection in several.connections:
        connection.data_received(REQUEST)
    assert several.statuses == [b"", b"503"]
    await several.turns()
    assert several.statuses == [b"200", b"503"]


async def test_who_is_refused_is_answered_before_those_begin_who_were_taken_on(service: Service) -> None:
    service.admission._max_requests = 3
    several = Several(service, 5)
    for connection in several.connections[:3]:
        connection.data_received(REQUEST)
    await asyncio.sleep(0)
    begun = len(several.state.tasks)
    for connection in several.connections[3:]:
        connection.data_received(REQUEST)
    assert (begun, several.statuses[3:]) == (1, [b"503", b"503"])
    await several.turns()
    assert several.statuses == [b"200", b"200", b"200", b"503", b"503"]


async def test_who_was_taken_on_is_not_refused_when_its_turn_has_come(service: Service) -> None:
    several = Several(service, 1)
    several.connections[0].data_received(REQUEST)
    with service.admission.under_way():
        await several.turns()
    assert (several.statuses, service.num_refused) == ([b"200"], 0)


async def test_what_comes_of_a_request_while_it_waits_is_read_after_it(service: Service) -> None:
    several = Several(service, 1)
    several.connections[0].data_received(REQUEST[:-5])
    several.connections[0].data_received(REQUEST[-5:])
    await several.turns()
    assert (several.statuses, service.asked) == ([b"200"], ["/retrieve"])


async def test_a_client_that_leaves_while_its_request_waits_costs_nothing(service: Service) -> None:
    several = Several(service, 2)
    several.connections[0].data_received(REQUEST)
    several.wires[0].closing = True
    await several.turns()
    several.connections[1].data_received(REQUEST)
    await several.turns()
    assert (several.statuses, service.asked) == ([b"", b"200"], ["/retrieve"])


class Wire:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.sent = b""
        self.closing = False

    def write(self, data: bytes) -> None:
        self.sent += data

    def get_extra_info(self, name: str, default: object = None) -> object:
        return default

    def is_closing(self) -> bool:
        return self.closing

    def resume_reading(self) -> None:
        pass

    def pause_reading(self) -> None:
        pass


def test_none_is_refused_while_there_is_room(service: Service, connection: socket.socket) -> None:
    with ExitStack():
        assert [_answer(connection, REQUEST)[0] for _ in range(5)] == [200] * 5
    assert service.num_refused == 0
