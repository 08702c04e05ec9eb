"""Passes a push's buckets to its links, with two buckets in memory, and without waiting long for a hanging link.

The next bucket is put once every link has sent the previous one. A link is behind when it needs `_PATIENCE_S` and
`_TIMES` times as long as the fastest link for a bucket. Its buckets are then kept in memory, and the other links
continue, until it has caught up or failed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_PATIENCE_S = 0.5
_TIMES = 3.0


class Feed:
    """The queue of one link: buckets in order, then the digest as a string."""

    def __init__(self) -> None:
        self.items: asyncio.Queue[Tensor | str] = asyncio.Queue()
        self.is_wanted = asyncio.Event()  # set when the link has sent all its items
        self.is_wanted.set()

    def put(self, item: Tensor | str) -> None:
        self.is_wanted.clear()
        self.items.put_nowait(item)

    def has_sent_one(self) -> None:
        """Note that the link has sent its latest item."""
        if self.items.empty():
            self.is_wanted.set()


class Feeds:
    """The queues of a push. links: each link's task and its queue."""

    def __init__(self, links: Sequence[tuple[asyncio.Task[Any], Feed]]) -> None:
        self._links = links
        self._behind: set[Feed] = set()
        self._put_at = time.monotonic()

    async def put(self, item: Tensor | str) -> bool:
        """Put the item into every live link's queue, once all links that are not behind have sent the previous one.

        Returns whether all queues were empty: the memory of earlier buckets is free then.
        """
        await self._wait_for_pace()
        live = [feed for push, feed in self._links if not push.done()]
        is_free = all(feed.is_wanted.is_set() for feed in live)
        for feed in live:
            feed.put(item)
        self._put_at = time.monotonic()
        return is_free

    async def _wait_for_pace(self) -> None:
        live = [(push, feed) for push, feed in self._links if not push.done()]
        self._behind = {feed for _, feed in live if feed in self._behind and not feed.is_wanted.is_set()}
        awaited = [pair for pair in live if pair[1] not in self._behind] or live
        waiting: dict[asyncio.Future[None], Feed] = {
            asyncio.ensure_future(_ready(push, feed)): feed for push, feed in awaited
        }
        try:
            await self._wait_for_fastest(waiting)
            took_s = time.monotonic() - self._put_at
            if waiting:
                await asyncio.wait(waiting, timeout=max(_PATIENCE_S, _TIMES * took_s))
            self._behind |= {feed for wait, feed in waiting.items() if not wait.done()}
        finally:
            for wait in waiting:
                wait.cancel()

    async def _wait_for_fastest(self, waiting: dict[asyncio.Future[None], Feed]) -> None:
        """Return once a live link has sent its items, or all links have failed."""
        left: set[asyncio.Future[None]] = set(waiting)
        while left and not any(feed.is_wanted.is_set() for feed in waiting.values()):
            _, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)


async def _ready(push: asyncio.Task[Any], feed: Feed) -> None:
    """Return once the link wants the next item, or its push has ended."""
    wanted = asyncio.ensure_future(feed.is_wanted.wait())
    try:
        await asyncio.wait({push, wanted}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        wanted.cancel()
