"""The answer to one request for a turn: begun or found, awaited while its client waits, sent whole or as a stream."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from protocol.errors import NeighbourError
from rollout.endpoint.answers import ALIVE, DONE, TurnReply, error_event
from rollout.endpoint.rendering import TurnRequest
from rollout.endpoint.requests import Refusal
from rollout.endpoint.retries import PendingTurn, RequestId
from rollout.endpoint.session import AgentSession

# A stream begins with its turn, so that a refusal has its own status, but no later than this.
_STREAM_BEGINS_S = 5.0


@dataclass(frozen=True)
class AnswerForm:
    """Form of an answer: of chat or of completions."""

    whole: Callable[[TurnReply, TurnRequest], bytes]  # body of a whole answer
    events: Callable[[TurnReply, TurnRequest], Iterator[bytes]]  # events of a stream


async def answer(
    request: Request, session: AgentSession, turn_request: TurnRequest, sent: RequestId, form: AnswerForm
) -> Response:
    """Return the answer to a request, which may be a retry.

    Raises: Refusal; ClientDisconnect when the client left: its turn is still made.
    """
    pending = session.retries.begin(sent, lambda: session.turn(turn_request))
    is_streamed = bool(turn_request.body.stream)
    with _waiting(pending):
        await _until_done_or_left(request, pending, _STREAM_BEGINS_S if is_streamed else None)
        if is_streamed:
            if pending.task.done():
                _reply(session, pending)
            return _Stream(_events(session, pending, turn_request, form), pending)
        reply = _reply(session, pending)
        session.mark_sent(reply)
        pending.is_delivered = True
    return Response(form.whole(reply, turn_request), media_type="application/json")


class _Stream(StreamingResponse):
    """Events. Its client counts as waiting from now to the end of the stream.

    Otherwise no client would wait between the return of `answer` and the stream's begin, and an equal request in this
    gap would be taken for a retry.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], pending: PendingTurn) -> None:
        super().__init__(events)
        self._pending = pending
        pending.num_waiting += 1

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._pending.num_waiting -= 1


async def _events(
    session: AgentSession, pending: PendingTurn, turn_request: TurnRequest, form: AnswerForm
) -> AsyncIterator[bytes]:
    while not pending.task.done():
        yield ALIVE
        await asyncio.wait({pending.task}, timeout=_STREAM_BEGINS_S)
    try:
        reply = _reply(session, pending)
    except Refusal as refused:
        yield error_event(refused.body())
        return
    session.mark_sent(reply)
    for event in form.events(reply, turn_request):
        yield event
    # Clients disconnect after the last event.
    pending.is_delivered = True
    yield DONE


@contextmanager
def _waiting(pending: PendingTurn) -> Iterator[None]:
    """Count a client that waits for this turn within the block."""
    pending.num_waiting += 1
    try:
        yield
    finally:
        pending.num_waiting -= 1


async def _until_done_or_left(request: Request, pending: PendingTurn, limit_s: float | None) -> None:
    """Return when the turn is done, or after limit_s. Raises: ClientDisconnect."""
    left = asyncio.create_task(_left(request))
    try:
        await asyncio.wait({pending.task, left}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if left.done() and not pending.task.done():
            raise ClientDisconnect
    finally:
        left.cancel()
        with suppress(asyncio.CancelledError):
            await left


async def _left(request: Request) -> None:
    """Return when the client has disconnected. The body was read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _reply(session: AgentSession, pending: PendingTurn) -> TurnReply:
    """Return the finished turn. Raises: Refusal with the reason of its failure."""
    task = pending.task
    if task.cancelled():
        session.end.check_open()
        raise Refusal(503, "the turn was cancelled")
    error = task.exception()
    if error is None:
        return task.result()
    if isinstance(error, Refusal):
        raise error
    session.end.check_open()
    raise Refusal(500, str(error) if isinstance(error, NeighbourError) else type(error).__name__)
