"""Asks servers for tokens all the time, and compares the version on each with the weights that wrote it."""

import asyncio
import threading
import time
from collections.abc import Mapping
from typing import Any

from tests.chaos.rig.control_line import ControlLine

_NUM_TOKENS = 10
_LIMIT_S = 3.0
_AGAIN_S = 0.05


class TokenWatch:
    """Reads servers' tokens in a thread of its own, from now until `close`.

    num_wrong: tokens whose weights are not of the version on them. newest: each server's newest version on a token.
    """

    def __init__(self, where: Mapping[str, tuple[str, int]]) -> None:
        self.num_tokens = self.num_wrong = 0
        self.newest: dict[str, int] = dict.fromkeys(where, -1)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="token-watch", daemon=True)
        self._thread.start()
        self._tasks = [
            asyncio.run_coroutine_threadsafe(self._ask_for_ever(name, *address), self._loop)
            for name, address in where.items()
        ]

    def seconds_until(self, version: int, names: set[str], limit_s: float) -> float:
        """Return after how many seconds each of these servers has written a token of this version; inf: too late."""
        begun = time.monotonic()
        while any(self.newest[name] < version for name in names):
            if time.monotonic() - begun > limit_s:
                return float("inf")
            time.sleep(0.01)
        return time.monotonic() - begun

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def take(self, name: str, tokens: Any) -> None:
        """Compare what a server wrote."""
        self.num_tokens += len(tokens)
        self.num_wrong += sum(value != version for version, value in tokens)
        self.newest[name] = tokens[-1][0]

    async def _ask_for_ever(self, name: str, host: str, port: int) -> None:
        line = ControlLine(name, host, port)
        while True:
            try:
                async with asyncio.timeout(_LIMIT_S):
                    tokens = await line.call("answer", _NUM_TOKENS)
            except (OSError, RuntimeError):  # it is gone, out of reach, or serves nothing
                await asyncio.sleep(_AGAIN_S)
                continue
            self.take(name, tokens)
