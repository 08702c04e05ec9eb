"""Which requests are one: a client that asks again for what it did not get is given the first answer.

A request is one that came before when
- it has the same Idempotency-Key; or
- it has the same body, and it says itself that it is a retry (X-Stainless-Retry-Count above 0: OpenAI's clients) or
  that one's client left without its answer.
Two requests of one body whose clients both wait are two: an agent may draw several turns of one history. Each of them
that is tried again is given a turn of its own.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, Generic, TypeVar

from rollout.endpoint.refusals import Refused

_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class Sent:
    """A request as it came."""

    body: bytes  # digest of its path and its body
    key: str | None  # Idempotency-Key; None: it has none
    is_retry: bool  # it says so itself


@dataclass(eq=False)
class UnderWay(Generic[_Answer]):
    """A request and its answer."""

    body: bytes  # as in Sent
    task: "asyncio.Task[_Answer]"  # makes the answer
    num_waiting: int = 0  # clients that wait for it now
    num_retries: int = 0  # requests that asked for it again
    is_delivered: bool = False  # True: a client was sent the whole answer


class Retries(Generic[_Answer]):
    """Requests of one session, in one event loop."""

    def __init__(self) -> None:
        self._by_key: dict[str, UnderWay[_Answer]] = {}
        self._by_body: defaultdict[bytes, list[UnderWay[_Answer]]] = defaultdict(list)

    @property
    def num_under_way(self) -> int:
        """Requests whose answer is being made."""
        return sum(not each.task.done() for each in self._all())

    def begin(self, sent: Sent, make: Callable[[], Coroutine[Any, Any, _Answer]]) -> UnderWay[_Answer]:
        """Return the request that this one is, its answer under way; `make` is called for a new one.

        Raises: Refused when a key comes with another body.
        """
        found = self._by_key.get(sent.key) if sent.key is not None else self._same(sent)
        if found is not None:
            if found.body != sent.body:
                problem = "this Idempotency-Key came before with another body. Use a key of its own for each request"
                raise Refused(409, problem, "Idempotency-Key")
            found.num_retries += 1
            return found
        begun = UnderWay(sent.body, asyncio.create_task(make()))
        # Nobody may be there to hear of its failure.
        begun.task.add_done_callback(lambda task: task.cancelled() or task.exception())
        if sent.key is not None:
            self._by_key[sent.key] = begun
        else:
            self._by_body[sent.body].append(begun)
        return begun

    def cancel(self) -> None:
        """Stop what is under way."""
        for each in self._all():
            each.task.cancel()

    def _all(self) -> Iterator[UnderWay[_Answer]]:
        return chain(self._by_key.values(), *self._by_body.values())

    def _same(self, sent: Sent) -> UnderWay[_Answer] | None:
        """Return the request that one without a key repeats: of several the one that it is likeliest of."""
        alike = self._by_body.get(sent.body, [])
        left = next((each for each in alike if not each.is_delivered and not each.num_waiting), None)
        if left is not None or not sent.is_retry:
            return left
        # Its client may have hung up unnoticed so far, or an answer was lost on its way: most likely the newest.
        return min(reversed(alike), key=lambda each: (each.is_delivered, each.num_retries), default=None)
