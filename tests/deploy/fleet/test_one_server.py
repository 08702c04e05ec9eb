"""One server of the fleet: its class as the fleet starts it, calls to it, and the longest wait for one."""

import asyncio
import gc
import os
from math import inf
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray

from deploy.fleet import servers
from deploy.fleet.servers import LongestWait, host_class


class Served:
    """A server's class; `num_starts` as any state of its own."""

    num_starts = 0

    async def start(self, files: object) -> dict[str, Any]:
        """Return a description of the started server."""
        self.num_starts += 1
        return {"is_started": True}


def test_start_exempts_memory_from_garbage_collection_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get_gpu_ids", list)  # it starts a Ray where none runs
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


@pytest.mark.parametrize(("cards", "expected"), [([0], "=eth7"), ([], None)])
def test_workers_of_vllm_meet_on_the_interface_that_reaches_the_node(
    cards: list[int], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment: dict[str, str] = {}
    seen: list[str | None] = []

    class Starting:
        async def start(self, files: object) -> dict[str, Any]:
            seen.append(environment.get("NCCL_SOCKET_IFNAME"))  # vLLM's workers get what is set now
            return {}

    monkeypatch.setattr(f"{__name__}.Starting", Starting, raising=False)
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(ray, "get_gpu_ids", lambda: cards)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.9.8.7")
    monkeypatch.setattr("protocol.addresses.own_address_toward", lambda host: host)
    interfaces = {name: [SimpleNamespace(address=ip)] for name, ip in (("docker0", "172.17.0.1"), ("eth7", "10.9.8.7"))}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces)
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 1)
    asyncio.run(host_class(f"{__name__}:Starting")().start())
    assert seen == [expected]


def test_server_names_its_cards_in_one_order_after_every_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    # Ray returns a set's list: strings where CUDA_VISIBLE_DEVICES is set, whose order differs between processes.
    monkeypatch.setattr(ray, "get_gpu_ids", lambda: ["5", "4"])
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(servers, "own_node_id", lambda: "node")
    assert servers._place()["cards"] == ["4", "5"]


def test_longest_wait_is_named_and_the_others_are_counted() -> None:
    now = [0.0]
    wait = LongestWait(lambda: now[0])
    with wait.waiting_for("sluice-rollout-1", "end"):
        with wait.waiting_for("sluice-rollout-1", "end"):  # another call for the same
            now[0] = 2.0
        assert wait.describe(inf) == ""  # all waits are short
        with wait.waiting_for("sluice-rollout-0", "answer"):
            now[0] = 31.0
            assert wait.describe(inf) == "sluice-rollout-1 to end, 31 s, and 1 more"
            assert wait.describe(28.0) == "sluice-rollout-1 to end, 28 s, and 1 more"
    assert wait.describe(inf) == ""


def test_failed_wait_is_over() -> None:
    wait = LongestWait(lambda: 100.0)
    with pytest.raises(TimeoutError), wait.waiting_for("sluice-rollout-1", "end"):
        raise TimeoutError
    assert wait.describe(inf) == ""
