"""The fleet with real Ray and a small server class in place of the engine: warm, replaced, surplus, failed, dead."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError, RayTaskError

from deploy.fleet.fleet import Fleet
from deploy.fleet.servers import server_names
from protocol.errors import NeighbourError
from tests.deploy.running_cluster import RunningCluster
from tests.fakes.waiting import wait_until

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def fleet(cluster: RunningCluster) -> Iterator[Any]:
    with cluster.connected():
        yield ray.remote(Fleet).options(num_cpus=0).remote("tiny_server:TinyServer")


def request(seed: int, code: str = "") -> dict[str, Any]:
    return {
        "model": "a/model",
        "dtype": "float32",
        "tensor_parallel_size": 1,
        "seed": seed,
        "max_model_len": 64,
        "trust_remote_code": False,
        "weights_backend": "gloo",
        "engine_args": {},
        "code": code,
    }


def ensure(fleet: Any, seed: int, num_servers: int, code: str = "") -> list[tuple[str, bool]]:
    infos = ray.get(fleet.ensure.remote(request(seed, code), num_servers), timeout=240)
    assert all(info["node_ip"] for info in infos)
    assert {info["shared_retriever_url"] for info in infos} == {None}  # of a cluster on loopback
    return [(info["name"], info["warm"]) for info in infos]


def pids(fleet: Any) -> dict[str, int]:
    return {server["name"]: server["pid"] for server in ray.get(fleet.describe.remote(), timeout=240)}


def test_fleet_starts_servers_and_finds_them_warm(fleet: Any) -> None:
    assert ensure(fleet, 0, 2) == [("sluice-rollout-0", False), ("sluice-rollout-1", False)]
    before = pids(fleet)
    assert ensure(fleet, 0, 2) == [("sluice-rollout-0", True), ("sluice-rollout-1", True)]
    assert pids(fleet) == before


def test_rays_head_keeps_nothing_of_calls_to_servers(fleet: Any) -> None:
    ensure(fleet, 0, 1)
    pids(fleet)  # which the fleet asks the server for
    deadline = time.monotonic() + 30
    told: set[str] = set()
    while "task::Fleet.describe" not in told and time.monotonic() < deadline:
        time.sleep(0.5)
        told = {str(event["cat"]) for event in ray.timeline() or []}
    assert "task::Fleet.describe" in told  # this test made the fleet itself, as any actor is made
    assert not [call for call in told if "Server" in call]


def test_fleet_stops_servers_that_are_too_many(fleet: Any) -> None:
    ensure(fleet, 0, 2)
    assert ensure(fleet, 0, 1) == [("sluice-rollout-0", True)]
    assert server_names() == ["sluice-rollout-0"]


def test_fleet_replaces_a_server_of_another_engine(fleet: Any) -> None:
    ensure(fleet, 0, 1)
    before = pids(fleet)
    assert ensure(fleet, 1, 1) == [("sluice-rollout-0", False)]
    assert pids(fleet) != before


def test_fleet_replaces_a_server_of_other_code(fleet: Any) -> None:
    ensure(fleet, 1, 1, code="before")
    before = pids(fleet)
    assert ensure(fleet, 1, 1, code="after") == [("sluice-rollout-0", False)]
    assert pids(fleet) != before


def test_fleet_of_another_process_finds_the_servers(fleet: Any) -> None:
    ensure(fleet, 1, 1)
    other = ray.remote(Fleet).options(num_cpus=0).remote("tiny_server:TinyServer")
    assert ensure(other, 1, 1) == [("sluice-rollout-0", True)]
    ray.kill(other)


def test_server_that_refuses_to_start_is_reported_with_its_log_and_removed(fleet: Any) -> None:
    with pytest.raises(RayTaskError) as caught:
        ensure(fleet, 13, 2)
    assert isinstance(caught.value.cause, NeighbourError)
    assert "did not start: engine: unlucky. The end of its log: the engine's own words." in str(caught.value.cause)
    assert server_names() == []


def test_server_that_did_start_stays_warm_where_another_did_not(fleet: Any, tmp_path: Path) -> None:
    wanted = {**request(16), "model": str(tmp_path / "model")}
    with pytest.raises(RayTaskError, match="unlucky"):
        ray.get(fleet.ensure.remote(wanted, 3), timeout=240)
    assert server_names() == ["sluice-rollout-0", "sluice-rollout-2"]
    (tmp_path / "model").touch()
    infos = ray.get(fleet.ensure.remote(wanted, 3), timeout=240)
    assert [info["warm"] for info in infos] == [True, False, True]


def test_fleet_says_which_server_it_waits_for(fleet: Any) -> None:
    starting = fleet.ensure.remote(request(15), 1)
    said: set[str] = set()
    while not ray.wait([starting], timeout=0.2)[0]:
        said.add(ray.get(fleet.describe_wait.remote(240.0), timeout=240))
    (info,) = ray.get(starting)

    assert any(words.startswith(f"sluice-rollout-0 to load its model on node {info['node_ip']}, ") for words in said)
    assert ray.get(fleet.describe_wait.remote(240.0), timeout=240) == ""


def test_server_that_dies_at_its_start_is_reported_and_removed(fleet: Any) -> None:
    with pytest.raises(RayTaskError) as caught:
        ensure(fleet, 14, 1)
    assert isinstance(caught.value.cause, NeighbourError)
    assert "sluice-rollout-0: did not start" in str(caught.value.cause)
    assert server_names() == []


def test_fleet_starts_the_engine_of_a_process_that_ray_has_started_again(fleet: Any) -> None:
    ensure(fleet, 2, 1)
    kill_server()
    again = pids_again(fleet)
    assert ensure(fleet, 2, 1) == [("sluice-rollout-0", False)]
    assert [server["is_alive"] for server in ray.get(fleet.describe.remote(), timeout=240)] == [True]
    assert pids(fleet) == again


def test_run_that_goes_on_does_not_wait_for_servers_that_are_not_ready(fleet: Any) -> None:
    ensure(fleet, 2, 2)
    kill_server()
    infos = ray.get(fleet.ensure.remote(request(2), 3, may_be_late=True), timeout=240)
    assert [(info["name"], info["warm"], info["is_started"]) for info in infos] == [
        ("sluice-rollout-0", False, False),
        ("sluice-rollout-1", True, True),
        ("sluice-rollout-2", False, False),
    ]
    assert len({info["node_ip"] for info in infos}) == 1
    started = {server["name"]: server.get("is_started") for server in ray.get(fleet.describe.remote(), timeout=240)}
    assert started == {"sluice-rollout-0": False, "sluice-rollout-1": True, "sluice-rollout-2": False}
    assert ensure(fleet, 2, 3) == [
        ("sluice-rollout-0", False),
        ("sluice-rollout-1", True),
        ("sluice-rollout-2", False),
    ]


def test_run_that_goes_on_waits_where_no_server_is_ready(fleet: Any) -> None:
    ensure(fleet, 2, 1)
    (info,) = ray.get(fleet.ensure.remote(request(3), 1, may_be_late=True), timeout=240)
    assert (info["name"], info["warm"], info["is_started"]) == ("sluice-rollout-0", False, True)


def test_process_that_ray_has_started_again_goes_for_another_engine(fleet: Any) -> None:
    ensure(fleet, 2, 1)
    kill_server()
    again = pids_again(fleet)
    assert ensure(fleet, 3, 1) == [("sluice-rollout-0", False)]
    assert pids(fleet) != again
    assert ensure(fleet, 3, 1) == [("sluice-rollout-0", True)]


def pids_again(fleet: Any) -> dict[str, int]:
    """Return the servers' processes once Ray has started one again for each."""
    wait_until(lambda: all(pids(fleet).values()), limit_s=60.0)
    return pids(fleet)


def kill_server() -> None:
    """Have the first server's process end by itself."""
    # Waited for: the fleet's question could else be answered before.
    with pytest.raises(RayActorError):
        ray.get(ray.get_actor("sluice-rollout-0", namespace="sluice").die.remote(), timeout=240)


def test_stop_all_leaves_no_server(fleet: Any) -> None:
    ensure(fleet, 0, 2)
    ray.get(fleet.stop_all.remote(), timeout=240)
    assert server_names() == []


def test_fleet_logs_are_files_of_the_server_itself(fleet: Any) -> None:
    ensure(fleet, 0, 1)
    (server,) = ray.get(fleet.describe.remote(), timeout=240)
    assert Path(server["log"]).is_file()
