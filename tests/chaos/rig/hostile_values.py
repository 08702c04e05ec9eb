"""Generated rows, environments' answers and services' replies: all that is promised is that they can be sent."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from protocol.errors import NeighbourError
from protocol.wire.messages import Columns, Text, Turns
from rollout.environments.base import Observation, Step

CONTROL_NAMES = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_row_decoder = msgspec.msgpack.Decoder(tuple[Text | Turns, Any, Columns])


@dataclass(frozen=True)
class Reply:
    """What a service answers, bytes as they go out."""

    status: bytes
    headers: bytes  # whole lines, each with its end
    body: bytes


@dataclass(frozen=True)
class Row:
    """A row and what everybody does with it; None: as a sound one would."""

    prompt: Any
    label: Any
    columns: dict[str, Any]
    reset: Callable[[], Any] | None = None  # gives or raises
    step: Callable[[], Any] | None = None  # gives or raises
    reward: Reply | None = None
    search: Reply | None = None


class _Odd:
    """A value of a user's own class, which says nothing without raising."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")

    __str__ = __repr__

    def __bool__(self) -> bool:
        raise RuntimeError("neither")

    def item(self) -> Any:
        raise RuntimeError("no number")


# -- what may stand anywhere ------------------------------------------------------------------------------------------

_texts = st.one_of(st.text(max_size=40), st.sampled_from(CONTROL_NAMES), st.text("<|im_end>\n\0\x85", max_size=30))
_numbers = st.one_of(st.integers(-(2**63), 2**64 - 1), st.floats(), st.booleans())
_leaves = st.one_of(st.none(), _numbers, _texts, st.binary(max_size=20), st.datetimes(), st.dates(), st.times())
_values = st.recursive(
    _leaves,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(_texts, inner, max_size=4)),
    max_leaves=8,
)
_messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.one_of(st.sampled_from(["user", "system", "assistant"]), _values), "content": _values}
    ),
    min_size=1,
    max_size=3,
)
_prompts = st.one_of(_texts.filter(bool), _messages, _texts.map(lambda text: text * 300).filter(bool))
_surrogates = st.text(st.characters(), max_size=20)  # those that UTF-8 has no bytes for among them
_objects = st.one_of(
    _values, _surrogates, st.builds(_Odd), st.just(object), st.complex_numbers(), st.sets(st.integers()), st.integers()
)
_errors = st.sampled_from(
    [
        *(KeyError("board"), SystemExit(1), KeyboardInterrupt(), GeneratorExit(), BaseException("base")),
        *(asyncio.CancelledError(), TimeoutError("mine"), RecursionError(), MemoryError(), StopAsyncIteration()),
        *(NeighbourError("", "down\n\ud800"), NeighbourError("x" * 500, "y" * 9000), OSError(5, "x")),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "z"),
    ]
)


def _raising(error: BaseException) -> Callable[[], Any]:
    def call() -> Any:
        raise error

    return call


def _giving(values: "st.SearchStrategy[Any]") -> "st.SearchStrategy[Callable[[], Any]]":
    return st.one_of(values.map(lambda value: lambda: value), _errors.map(_raising))


_observations = st.one_of(
    _objects, st.builds(Observation, _objects, _objects, _objects), st.builds(Observation, _texts)
)
_steps = st.one_of(
    _objects,
    st.builds(Step, observation=_observations, is_done=st.booleans(), reward=_objects, finish=_objects),
    st.builds(Step, observation=_texts, is_done=st.booleans(), reward=st.none() | _numbers),
    st.just(Step(is_done=True, finish="won")),  # type: ignore[arg-type]
    st.just(Step("x" * (1 << 21))),
)
_header_text = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=30).map(str.encode)
_retry_after = st.one_of(
    _header_text,
    st.integers().map(lambda number: str(number).encode()),
    st.floats().map(lambda number: str(number).encode()),
    st.just(b"Jan 0001 EST 99:99:99 99999999999999999999 12:00 24"),
)
_headers = st.one_of(
    st.just(b""),
    _retry_after.map(lambda text: b"retry-after: " + text + b"\r\n"),
    st.binary(max_size=30).map(lambda value: b"x-odd: " + re.sub(rb"[\r\n\0]", b"", value) + b"\r\n"),
    st.sampled_from([b"content-encoding: gzip\r\n", b"location: /\r\n", b"content-type: text/html\r\n"]),
)
_json = st.recursive(
    st.one_of(st.none(), _numbers, _surrogates),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=9), inner, max_size=3)),
    max_leaves=6,
)
_shaped = st.one_of(
    _json,
    _json.map(lambda value: {"rewards": value}),
    _json.map(lambda value: {"rewards": [value]}),
    _json.map(lambda value: {"result": value}),
    _json.map(lambda value: {"result": [[value]]}),
    _json.map(lambda value: {"result": [[{"document": value, "score": value}]]}),
    _surrogates.map(lambda text: {"result": [[{"document": {"id": 1, "contents": text}, "score": 1}]]}),
    st.sampled_from(CONTROL_NAMES).map(lambda name: {"result": [[f"a {name} b {name}"]]}),
)
_bodies = st.one_of(
    _shaped.map(lambda value: json.dumps(value).encode()), st.binary(max_size=60), st.just(b"[" * 5000), st.just(b"")
)
# Few that say that nobody is there: those are waited out by design, and asked again while many of them come.
_statuses = st.sampled_from(
    [b"200 OK"] * 14
    + [b"200", b"201 x", b"301 x", b"400 \xff", b"404 x", b"418 x", b"422 x", b"429 x", b"500 x", b"999 x"]
    + [b"503 x", b"two hundred"]
)
_replies = st.builds(Reply, _statuses, _headers, _bodies)


# -- rows -------------------------------------------------------------------------------------------------------------


def hostile_rows(number: int, seeded: int) -> list[Row]:
    """Return so many rows with something odd about each, the same for the same seed."""
    rows: list[Row] = []
    one_row = st.one_of(
        st.builds(Row, _prompts, _values, st.dictionaries(_texts, _values, max_size=4)).filter(_can_be_sent),
        _giving(_objects).map(lambda reset: Row("hostile", "4", {}, reset=reset)),
        _giving(_steps).map(lambda step: Row("hostile", "4", {}, step=step)),
        _replies.map(lambda reply: Row("hostile", "4", {}, reward=reply)),
        _replies.map(lambda reply: Row("hostile", "4", {}, search=reply)),
    )

    @seed(seeded)
    @settings(
        max_examples=number,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(one_row)
    def take(row: Row) -> None:
        rows.append(row)

    take()
    # hypothesis ends early when it has seen what there is to see.
    return [rows[i % len(rows)] for i in range(number)]


def _can_be_sent(row: Row) -> bool:
    """Return whether `load_prompts` would let a row through."""
    try:
        encoded = msgspec.msgpack.encode((row.prompt, row.label, row.columns))
        _row_decoder.decode(encoded)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError):
        return False
    return True


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
