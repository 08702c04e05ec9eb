"""One server of the fleet: its class as the fleet starts it, calls to it, and the longest wait for one."""

import asyncio
import gc
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError

from deploy.fleet.servers import LongestWait, describe_server, host_class


class Served:
    """A server's class; `num_starts` as any state of its own."""

    num_starts = 0

    async def start(self, files: object) -> dict[str, Any]:
        """Return a description of the started server."""
        self.num_starts += 1
        return {"is_started": True}


def test_start_exempts_memory_from_garbage_collection_once() -> None:
    assert not gc.get_freeze_count()
    server: Any = host_class(f"{__name__}:Served")()
    try:
        assert asyncio.run(server.start()) == {"is_started": True}
        num_frozen = gc.get_freeze_count()
        assert num_frozen > 10_000
        asyncio.run(server.start())
        assert server.num_starts == 2
        assert gc.get_freeze_count() <= num_frozen  # fewer where another thread has released some
    finally:
        gc.unfreeze()


class AwayServer:
    """A handle of an actor that has no process for a number of calls."""

    def __init__(self, num_away: int) -> None:
        self.num_asked = 0
        self._num_away = num_away
        self.where = self.describe = SimpleNamespace(remote=self._answer)

    async def _answer(self) -> dict[str, Any]:
        self.num_asked += 1
        if self.num_asked <= self._num_away:
            raise ActorUnavailableError("The actor is temporarily unavailable", None)
        return {"is_alive": True, "node_ip": "10.0.0.2"}


@pytest.mark.parametrize(("num_away", "away_s", "is_alive"), [(1000, 0.0, False), (2, 20.0, True), (1000, 0.5, False)])
def test_server_without_a_process_is_awaited_as_long_as_asked(num_away: int, away_s: float, is_alive: bool) -> None:
    server = AwayServer(num_away)
    described = asyncio.run(describe_server("sluice-rollout-1", away_s, find=lambda name: server))
    assert (described["name"], described["is_alive"]) == ("sluice-rollout-1", is_alive)
    assert away_s or server.num_asked == 1


def test_longest_wait_is_named_and_the_others_are_counted() -> None:
    now = [0.0]
    wait = LongestWait(lambda: now[0])
    with wait.waiting_for("sluice-rollout-1", "end"):
        with wait.waiting_for("sluice-rollout-1", "end"):  # another call for the same
            now[0] = 2.0
        assert wait.describe() == ""  # all waits are short
        with wait.waiting_for("sluice-rollout-0", "answer"):
            now[0] = 31.0
            assert wait.describe() == "sluice-rollout-1 to end, 31 s, and 1 more"
            assert wait.describe(28.0) == "sluice-rollout-1 to end, 28 s, and 1 more"
    assert wait.describe() == ""


def test_failed_wait_is_over() -> None:
    wait = LongestWait(lambda: 100.0)
    with pytest.raises(TimeoutError), wait.waiting_for("sluice-rollout-1", "end"):
        raise TimeoutError
    assert wait.describe() == ""
