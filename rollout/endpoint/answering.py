"""One request for a turn: found or begun, waited for beside its client, answered whole or as a stream."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from protocol.errors import NeighbourError
from rollout.endpoint.agent_session import AgentSession, Turned
from rollout.endpoint.answers import ALIVE, DONE, error_event
from rollout.endpoint.bodies import ChatBody, TextBody
from rollout.endpoint.refusals import Refused
from rollout.endpoint.rendering import Asked
from rollout.endpoint.retries import Sent, UnderWay

# A stream begins when its turn is there, so that a refusal has a status of its own, but no later than this.
_STREAM_BEGINS_S = 5.0


@dataclass(frozen=True)
class Answering:
    """How a request is answered."""

    body: ChatBody | TextBody  # as it came
    has_logprobs: bool  # tell each token's
    max_tokens: int | None  # most tokens of the turn; None: as rollout.* says
    whole: Callable[[Turned, str, bool], dict[str, Any]]  # (turn, model, has_logprobs) -> the reply
    events: Callable[[Turned, str, bool, bool], Iterator[bytes]]  # the same and has_usage -> its events


async def answer(request: Request, session: AgentSession, asked: Asked, sent: Sent, answering: Answering) -> Response:
    """Return the answer to a request, which may be that of one that came before.

    Raises: Refused with the reason, ClientDisconnect when nobody waits for it any more: the turn is written on.
    """
    under_way = session.retries.begin(
        sent,
        lambda: session.turn(asked, answering.body.stops, answering.max_tokens, answering.has_logprobs),
    )
    with _waiting(under_way):
        await _until_done_or_left(request, under_way, _STREAM_BEGINS_S if answering.body.stream else None)
        if answering.body.stream:
            if under_way.task.done():
                _result(session, under_way)
            return _Stream(_events(session, under_way, answering), under_way)
        turned = _result(session, under_way)
        turned.hear()
        under_way.is_delivered = True
    return _Json(json.dumps(answering.whole(turned, answering.body.model, answering.has_logprobs)))


class _Json(Response):
    media_type = "application/json"


class _Stream(StreamingResponse):
    """Events. Its client counts as one that waits from now until the stream has ended, however it does.

    Without this nobody would wait between a request's end and its stream's beginning, and an equal request that came
    then would be taken for a retry.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], under_way: UnderWay[Turned]) -> None:
        super().__init__(events)
        self._under_way = under_way
        under_way.num_waiting += 1

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._under_way.num_waiting -= 1


async def _events(session: AgentSession, under_way: UnderWay[Turned], answering: Answering) -> AsyncIterator[bytes]:
    while not under_way.task.done():
        yield ALIVE
        await asyncio.wait({under_way.task}, timeout=_STREAM_BEGINS_S)
    try:
        turned = _result(session, under_way)
    except Refused as refused:
        yield error_event(refused.body())
        return
    turned.hear()
    body = answering.body
    for event in answering.events(turned, body.model, answering.has_logprobs, body.has_usage_chunk):
        yield event
    # Clients hang up when they have read this.
    under_way.is_delivered = True
    yield DONE


@contextmanager
def _waiting(under_way: UnderWay[Turned]) -> Iterator[None]:
    """Count a client that waits for this answer, until the block ends."""
    under_way.num_waiting += 1
    try:
        yield
    finally:
        under_way.num_waiting -= 1


async def _until_done_or_left(request: Request, under_way: UnderWay[Turned], limit_s: float | None) -> None:
    """Return once the answer is there, or after limit_s. Raises: ClientDisconnect."""
    left = asyncio.create_task(_left(request))
    try:
        await asyncio.wait({under_way.task, left}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if left.done() and not under_way.task.done():
            raise ClientDisconnect
    finally:
        left.cancel()
        with suppress(asyncio.CancelledError):
            await left


async def _left(request: Request) -> None:
    """Return when the client has gone; the body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _result(session: AgentSession, under_way: UnderWay[Turned]) -> Turned:
    """Return the turn that was written. Raises: Refused with the reason why there is none."""
    task = under_way.task
    if task.cancelled():
        session.end.check_open()
        raise Refused(503, "the turn was given up")
    error = task.exception()
    if error is None:
        return task.result()
    if isinstance(error, Refused):
        raise error
    session.end.check_open()
    raise Refused(500, str(error) if isinstance(error, NeighbourError) else type(error).__name__)
