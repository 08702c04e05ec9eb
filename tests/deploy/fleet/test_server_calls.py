"""How servers are described that Ray is about to start again: at once, where nobody is to wait for them."""

import asyncio
from types import SimpleNamespace
from typing import Any

from ray.exceptions import ActorUnavailableError

from deploy.fleet.servers import describe_server


class Server:
    """A handle of an actor that has no process for so many calls."""

    def __init__(self, num_away: int) -> None:
        self.num_asked = 0
        self._num_away = num_away
        self.where = self.describe = SimpleNamespace(remote=self._answer)

    async def _answer(self) -> dict[str, Any]:
        self.num_asked += 1
        if self.num_asked <= self._num_away:
            raise ActorUnavailableError("The actor is temporarily unavailable", None)
        return {"is_alive": True, "node_ip": "10.0.0.2"}

    def described(self, away_s: float = 0.0) -> dict[str, Any]:
        return asyncio.run(describe_server("sluice-rollout-1", away_s, lambda name: self))


def test_server_without_a_process_is_told_at_once() -> None:
    server = Server(num_away=1000)
    told = server.described()
    assert (told["name"], told["is_alive"], told["node_ip"]) == ("sluice-rollout-1", False, "")
    assert server.num_asked == 1


def test_server_without_a_process_is_waited_for_where_a_run_begins() -> None:
    assert Server(num_away=2).described(away_s=20.0)["is_alive"]
    assert not Server(num_away=1000).described(away_s=0.5)["is_alive"]
