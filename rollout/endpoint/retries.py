"""Requests of a session by identity: a client that retries a request gets the first answer.

A request is a retry of an earlier one when
- it has the same Idempotency-Key; or
- it has the same body, and it has an X-Stainless-Retry-Count other than 0 (OpenAI's clients), or the client of the
  earlier one left without its answer.
Two requests of one body, both with waiting clients, are two: an agent may draw several turns of one history.
"""

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from fastapi import Request
from starlette.requests import ClientDisconnect

from protocol.errors import NeighbourError
from protocol.http.app import wait_for_disconnect
from rollout.endpoint.requests import Refusal
from rollout.endpoint.turns import TurnReply


@dataclass(frozen=True)
class RequestId:
    """Identity of a request."""

    body: bytes  # digest of path and body
    key: str | None  # Idempotency-Key; None: the request has none
    is_retry: bool  # by its header

    @classmethod
    def of(cls, request: Request, raw: bytes) -> "RequestId":
        """Return the identity of a request with this body."""
        digest = hashlib.blake2b(request.url.path.encode() + b"\0" + raw, digest_size=16).digest()
        is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        return cls(digest, request.headers.get("idempotency-key"), is_retry)


@dataclass(eq=False)
class PendingTurn:
    """A turn of a request, in progress or done."""

    body: bytes  # digest, as in RequestId
    task: "asyncio.Task[TurnReply]"
    num_waiting: int = 0  # clients that wait for it now
    is_delivered: bool = False  # a client got the whole answer

    async def wait(self, request: Request) -> TurnReply:
        """Return the turn, for a client whose body was read.

        Raises: Refusal with the reason of a failure; ClientDisconnect when the client left: its turn is still made.
        """
        left = asyncio.create_task(wait_for_disconnect(request))
        self.num_waiting += 1
        try:
            await asyncio.wait({self.task, left}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.num_waiting -= 1
            left.cancel()
        if not self.task.done():
            raise ClientDisconnect
        if self.task.cancelled():
            raise Refusal(503, "the turn was cancelled")
        error = self.task.exception()
        if error is None:
            self.is_delivered = True
            return self.task.result()
        if isinstance(error, Refusal):
            raise error
        raise Refusal(500, str(error) if isinstance(error, NeighbourError) else type(error).__name__)


class Retries:
    """The requests of one session."""

    def __init__(self) -> None:
        self._by_key: dict[str, PendingTurn] = {}
        self._by_body: defaultdict[bytes, list[PendingTurn]] = defaultdict(list)

    @property
    def num_in_progress(self) -> int:
        """Number of turns in progress."""
        return sum(not each.task.done() for each in self.all())

    def begin(self, sent: RequestId, make: Callable[[], Coroutine[Any, Any, TurnReply]]) -> PendingTurn:
        """Return the request's turn: an earlier one for a retry, otherwise a new one from `make`.

        Raises: Refusal for a known key with another body.
        """
        original = self._by_key.get(sent.key) if sent.key is not None else self._find_original(sent)
        if original is not None:
            if original.body != sent.body:
                problem = "this Idempotency-Key came before with another body. Use one key per request"
                raise Refusal(409, problem, "Idempotency-Key")
            return original
        turn = PendingTurn(sent.body, asyncio.create_task(make()))
        # The client may have left: then no one awaits the task's exception.
        turn.task.add_done_callback(lambda task: task.cancelled() or task.exception())
        if sent.key is not None:
            self._by_key[sent.key] = turn
        else:
            self._by_body[sent.body].append(turn)
        return turn

    def cancel(self) -> None:
        """Cancel all turns in progress."""
        for each in self.all():
            each.task.cancel()

    def all(self) -> Iterator[PendingTurn]:
        """Yield all turns."""
        return chain(self._by_key.values(), *self._by_body.values())

    def _find_original(self, sent: RequestId) -> PendingTurn | None:
        """Return the turn that a request without a key most likely retries; None: it is a new request."""
        alike = self._by_body.get(sent.body, [])
        abandoned = next((each for each in alike if not each.is_delivered and not each.num_waiting), None)
        if abandoned is not None or not sent.is_retry:
            return abandoned
        # The client may have left unnoticed, or the answer got lost: most likely that of the newest request.
        return min(reversed(alike), key=lambda each: (each.is_delivered, each.num_waiting), default=None)
