"""A head in the foreground waits for its second node, which joins by its file; plans for both are obeyed; SIGTERM."""

import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from deploy.cluster.joining import head_checkout, this_checkout
from deploy.cluster.ray_processes import ray_processes
from deploy.fleet.fleet import Fleet
from deploy.fleet.processes import places
from deploy.node.home import Home
from learner.cluster import ray_door
from learner.cluster.processes import shared_cards
from learner.disk.model_folder import ModelSize
from learner.plan.memory import Sizes
from learner.plan.processes import Processes, Topology
from learner.plan.topology import plan_topology
from protocol.settings.settings import Settings
from tests.deploy.conftest import RAY_TOKEN
from tests.deploy.running_cluster import RunningCluster
from tests.fakes.ports import free_port

pytestmark = pytest.mark.stack

_PLANS = Path(__file__).parents[3] / "deploy" / "configs" / "plans"
_REQUEST = {
    "model": "a/model",
    "dtype": "float32",
    "tensor_parallel_size": 1,
    "seed": 0,
    "max_model_len": 64,
    "trust_remote_code": False,
    "weights_backend": "gloo",
    "engine_args": {},
}


def own_address() -> str | None:
    """Return an IPv4 address of this machine that is not loopback, for the head: 127.0.0.1 lets nobody join."""
    found = [
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family == socket.AF_INET and not address.address.startswith("127.")
    ]
    return found[0] if found else None


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[RunningCluster, RunningCluster]]:
    folders = tmp_path / "head", tmp_path / "other"
    for folder in folders:
        folder.mkdir()
    head, other = map(RunningCluster, folders)
    head.home.mkdir(mode=0o700)
    (head.home / "ray_token").touch(mode=0o600)
    (head.home / "ray_token").write_bytes(RAY_TOKEN.read_bytes())
    yield head, other
    for node in (other, head):
        node.stop()
        shutil.rmtree(Home(node.home).ray_folder, ignore_errors=True)


@pytest.mark.skipif(own_address() is None, reason="this machine has no address but loopback")
def test_head_waits_for_a_node_that_joins_by_its_file_and_ends_at_sigterm(
    nodes: tuple[RunningCluster, RunningCluster],
) -> None:
    head, other = nodes
    address = own_address()
    assert address is not None
    dashboard = free_port()
    here = ("--node-ip", address, "--num-cpus", "1", "--num-gpus", "3")
    here += ("--dashboard-port", str(dashboard), "--dashboard-host", address)
    begun = head.popen(*start_of(head, *here, "--block", "--wait-nodes", "2"))
    with begun as started:
        read_until(started, "Other nodes join with: sluice start --join ")
        there = ("--node-ip", "127.0.0.2", "--resources", '{"v100": 2}', "--num-cpus", "1", "--num-gpus", "3")
        joined = other.start("--join", str(head.home / "join"), *there)
        assert joined.returncode == 0, joined.stderr
        read_until(started, f"Ray's dashboard: http://{address}:{dashboard} ")
        read_until(started, "2 nodes are ready: ")
        read_until(started, "Running until SIGTERM or Ctrl-C.")
        assert resources(head)["v100"] == 2.0
        assert resources(head)["CPU"] == 2.0
        assert_searched_from(other, head)
        with head.connected():
            assert head_checkout() == this_checkout()
            assert_plans_are_obeyed(address, "127.0.0.2")
            assert_ranks_share_the_servers_gpus()
            assert_actors_that_take_nothing_are_where_they_are_planned()
        assert_jobs_run(head, address, dashboard)
        started.send_signal(signal.SIGTERM)
        assert started.wait(90.0) == 0
    assert not (head.home / "cluster.json").exists()
    assert not ray_processes(Home(head.home))
    assert ray_processes(Home(other.home))  # the other node's are its own to end


def assert_searched_from(asking: RunningCluster, node: RunningCluster) -> None:
    """Check that a node's retriever answers another node, at the address that servers are told, with their token."""
    url = node.state.shared_retriever_url
    assert url is not None
    assert "127.0.0.1" not in url
    headers = {"authorization": f"Bearer {Path(asking.state.token_file).read_text().strip()}"}
    with httpx.Client(trust_env=False) as http:
        assert http.post(url, json={"queries": ["Belarus"]}).status_code == 401
        found = http.post(url, json={"queries": ["Belarus"]}, headers=headers).json()
    assert [document["id"] for document in found["result"][0]] == ["a"]


def assert_plans_are_obeyed(first: str, second: str) -> None:
    """Check where servers and a rank are, and with which part of their node, after plans for these two nodes."""
    import ray

    fleet = ray.remote(Fleet).options(num_cpus=0).remote("tiny_server:TinyServer")
    packed = ensure(fleet, servers={"strategy": "packed"}, ranks={"resources": {"v100": 1}})
    assert packed == [(first, {"GPU": 1.0}), (first, {"GPU": 1.0})]
    assert rank_of(fleet, ranks={"resources": {"v100": 1}}) == (second, {"GPU": 1.0, "v100": 1.0})
    spread = ensure(fleet, servers={"resources": {"v100": 0.5}}, colocate=[["ranks", "servers"]])
    assert spread == [(second, {"GPU": 1.0, "v100": 0.5})] * 2
    ray.get(fleet.stop_all.remote(), timeout=240)
    ray.kill(fleet)


def assert_actors_that_take_nothing_are_where_they_are_planned() -> None:
    """Check that on nodes without GPUs too an actor is on the node that is named."""
    import ray

    asked = class_of_no_module("Asked", where=lambda _: ray.get_runtime_context().get_node_id())
    wanted = [node.node_id for node in ray_door.nodes() for _ in range(2)]
    actors = [ray.remote(num_cpus=0)(asked).options(**place.options()).remote() for place in places(4, 0, wanted, {})]
    assert ray.get([actor.where.remote() for actor in actors], timeout=240) == wanted
    for actor in actors:
        ray.kill(actor)


def assert_ranks_share_the_servers_gpus() -> None:
    """Check that each rank sees a GPU of a server on its node, and a process without a GPU none."""
    import ray

    plan = planned(4, size=2, devices="shared")
    where = lambda _: (ray.get_runtime_context().get_node_id(), os.environ["CUDA_VISIBLE_DEVICES"].split(","))  # noqa: E731
    seer = ray.remote(num_cpus=0)(class_of_no_module("Seer", see=where))

    def see(part: Processes, num_gpus: float, cards: list[str]) -> list[tuple[str, list[str]]]:
        there = places(part.count, num_gpus, [node.node_id for node in part.places], part.resources, cards)
        kept.extend(started := [seer.options(**place.options()).remote() for place in there])
        seen: list[tuple[str, list[str]]] = ray.get([actor.see.remote() for actor in started], timeout=240)
        return seen

    kept = [seer.remote()]
    assert ray.get(kept[0].see.remote(), timeout=240)[1] == [""]
    servers = see(plan.servers, plan.servers.num_gpus, [])
    infos = [{"name": "a server", "node_ip": "", "node_id": node, "cards": cards} for node, cards in servers]
    ranks = see(plan.ranks, 0, shared_cards(plan.ranks, infos))
    for actor in kept:
        ray.kill(actor)
    assert [len(cards) for _, cards in servers] == [2, 2]
    assert sorted(ranks) == sorted((node, [card]) for node, cards in servers for card in cards)


def assert_jobs_run(cluster: RunningCluster, host: str, port: int) -> None:
    """Check that a Ray job finds this cluster's Python, home and run, and that nobody submits one without the token."""
    url = f"http://{host}:{port}"
    submit = ("-m", "ray.scripts.scripts", "job", "submit", "--address", url, "--working-dir", str(_PLANS), "--")
    job = cluster.python(*submit, "python", "-m", "deploy.runs", "list")
    assert job.returncode == 0, job.stdout + job.stderr
    assert "No run uses this cluster" in job.stdout
    with httpx.Client(trust_env=False) as http:
        assert http.get(f"{url}/api/jobs/").status_code in (401, 403)


def planned(num_ranks: int = 1, size: int = 1, **placement: object) -> Topology:
    given = {
        "rollout": {"num_servers": 2, "tensor_parallel_size": size},
        "learner": {"num_ranks": num_ranks},
        "placement": placement,
    }
    return plan_topology(Settings.model_validate(given), Sizes(ModelSize(1000)), ray_door.nodes())


def ensure(fleet: Any, **placement: object) -> list[tuple[str, dict[str, float]]]:
    """Return the node of each server and what it takes of it, in the order of their names."""
    import ray

    part = planned(**placement).servers
    nodes = [node.node_id for node in part.places]
    ray.get(fleet.ensure.remote(_REQUEST, part.count, part.num_gpus, nodes, dict(part.resources)), timeout=240)
    described = ray.get(fleet.describe.remote(), timeout=240)
    return [(server["node_ip"], server["assigned"]) for server in described]


def rank_of(fleet: Any, **placement: object) -> tuple[str, dict[str, float]]:
    """Return the node of the one learner rank, and what it takes of it."""
    import ray

    part = planned(**placement).ranks
    borrower = ray.remote(num_cpus=0)(class_of_no_module("Borrower", live=lambda _: threading.Event().wait())).remote()
    nodes = [node.node_id for node in part.places]
    lent = fleet.lend_processes.remote(part.count, part.num_gpus, [borrower], nodes, dict(part.resources))
    (process,) = ray.get(lent, timeout=240)
    ray.get(process.load.remote("tiny_server:Whereabouts", {}), timeout=240)
    found: tuple[str, dict[str, float]] = ray.get(process.call.remote("where"), timeout=240)
    ray.kill(borrower)  # what it borrowed ends with it
    return found


def class_of_no_module(name: str, **methods: Any) -> type:
    """Return a class that Ray pickles whole: its workers cannot import this file."""
    return type(name, (), methods)


def start_of(cluster: RunningCluster, *options: str) -> list[str]:
    ports = ["--ray-port", str(cluster.ray_port), "--retriever-port", str(cluster.retriever_port)]
    ports += ["--reward-port", str(cluster.reward_port), "--corpus-path", str(cluster.corpus)]
    return ["-u", "-m", "deploy.cluster", "start", *ports, *options]


def read_until(process: "subprocess.Popen[str]", text: str, limit_s: float = 120.0) -> None:
    """Read lines up to the first one with this text."""
    assert process.stdout is not None
    deadline = time.monotonic() + limit_s
    seen = []
    for line in process.stdout:
        seen.append(line)
        if text in line:
            return
        assert time.monotonic() < deadline, seen
    raise AssertionError(f"ended without {text!r}: {seen}")


def resources(cluster: RunningCluster) -> dict[str, float]:
    import ray

    with cluster.connected():
        return dict(ray.cluster_resources())
