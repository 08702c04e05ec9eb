"""Nothing of a cluster on one machine, or of a run on it, can be reached from another machine."""

import ipaddress
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from tests.flow.flow_cluster import FlowCluster
from tests.flow.user_run import Bring

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def listening(cluster: FlowCluster, user: Bring) -> Iterator[set[tuple[str, str, int]]]:
    """Yield (process, address, port) of every socket that listens while a run is training."""
    with cluster.running(*user.options("loopback", {"run.max_steps": 1000})) as run:
        run.wait_until(lambda: user.left("loopback").last_step >= 1)
        processes = [psutil.Process(run.process.pid), *cluster.processes()]
        yield {found for process in processes for found in _listening(process)}


def test_everything_that_listens_is_on_loopback(listening: set[tuple[str, str, int]]) -> None:
    assert [found for found in sorted(listening) if not _is_loopback(found[1])] == []


@pytest.mark.parametrize(
    "name", ["gcs_server", "raylet", "retriever.serve", "rewards.serve", "CoordinatorProcess", "StandbyProcess"]
)
def test_the_sockets_of_every_part_are_among_those_looked_at(listening: set[tuple[str, str, int]], name: str) -> None:
    assert [address for process, address, _ in listening if name in process]


def test_rays_job_interface_refuses_who_has_no_token(listening: set[tuple[str, str, int]]) -> None:
    # All at once: most of them speak no HTTP and are silent until the time-out.
    with ThreadPoolExecutor(max_workers=32) as threads:
        answers = list(threads.map(_jobs_at, {port for _, _, port in listening}))
    assert 401 in {answer.status_code for answer in answers if answer is not None}
    # What else answers HTTP without a token are Prometheus metrics.
    let_in = [answer.text for answer in answers if answer is not None and answer.is_success]
    assert [text[:80] for text in let_in if not text.startswith("# HELP")] == []


def _jobs_at(port: int) -> httpx.Response | None:
    """Return what the port says to a request for Ray's jobs; None when it speaks no HTTP."""
    try:
        return httpx.get(f"http://127.0.0.1:{port}/api/jobs/", timeout=5.0)
    except httpx.HTTPError:
        return None


def _is_loopback(address: str) -> bool:
    """Return whether an address is of this machine alone; an IPv6 socket shows an IPv4 one as ::ffff:127.0.0.1."""
    parsed = ipaddress.ip_address(address)
    return ((isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped) or parsed).is_loopback


def _listening(process: psutil.Process) -> list[tuple[str, str, int]]:
    """Return the TCP sockets of a process that listen, and its UDP sockets that are bound."""
    try:
        name = " ".join(process.cmdline())[:300]
        return [
            (name, connection.laddr.ip, connection.laddr.port)
            for connection in process.net_connections(kind="inet")
            if connection.status == psutil.CONN_LISTEN or (connection.status == psutil.CONN_NONE and connection.laddr)
        ]
    except psutil.NoSuchProcess:
        return []
