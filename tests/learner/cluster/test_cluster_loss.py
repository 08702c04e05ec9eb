"""Whether a cluster is still there, asked of real processes and sockets."""

import os
import socket
import subprocess
import sys
import time

import psutil
import pytest

from learner.cluster.cluster_loss import describe_cluster_loss
from protocol.node.home import ClusterState, ProcessRecord
from protocol.node.identity import process_space, started_ticks
from tests.fakes.cluster_state import cluster_state


@pytest.fixture
def listener() -> "socket.socket":
    return socket.create_server(("127.0.0.1", 0))


def cluster(listener: "socket.socket", pid: int, started_at: float, name: str = "ray") -> ClusterState:
    host, port = listener.getsockname()[:2]
    record = ProcessRecord(name=name, pid=pid, started_at=started_at, url=None, log="")
    return cluster_state(ray_address=f"{host}:{port}", node_ip=host, processes=[record])


def test_cluster_is_there_while_its_process_runs_and_its_port_answers(listener: "socket.socket") -> None:
    with listener:
        assert describe_cluster_loss(cluster(listener, os.getpid(), psutil.Process().create_time())) is None


def test_cluster_has_ended_when_nobody_answers_at_rays_address(listener: "socket.socket") -> None:
    state = cluster(listener, os.getpid(), psutil.Process().create_time())
    listener.close()
    assert describe_cluster_loss(state) == f"Ray at {state.ray_address} does not answer (Connection refused)"


def test_cluster_has_ended_when_rays_process_is_gone_or_not_yet_buried(listener: "socket.socket") -> None:
    with listener:
        process = subprocess.Popen([sys.executable, "-c", "pass"])
        started_at = psutil.Process(process.pid).create_time()
        while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        gone = f"Ray's process on this node ({process.pid}) is gone"
        assert describe_cluster_loss(cluster(listener, process.pid, started_at)) == gone
        process.wait()
        assert describe_cluster_loss(cluster(listener, process.pid, started_at)) == gone


def test_process_of_the_same_number_that_is_another_is_not_rays(listener: "socket.socket") -> None:
    with listener:
        state = cluster(listener, os.getpid(), psutil.Process().create_time() - 60)
        assert describe_cluster_loss(state) == f"Ray's process on this node ({os.getpid()}) is gone"


def test_cluster_is_there_after_the_clock_was_set(listener: "socket.socket") -> None:
    with listener:
        state = cluster(listener, os.getpid(), psutil.Process().create_time() + 3600)
        told = {"ticks": started_ticks(os.getpid()), "processes": process_space()}
        recorded = [state.processes[0].model_copy(update=told)]
        assert describe_cluster_loss(state.model_copy(update={"processes": recorded})) is None


def test_service_that_died_does_not_end_the_cluster(listener: "socket.socket") -> None:
    with listener:
        assert describe_cluster_loss(cluster(listener, os.getpid(), 0.0, name="retriever")) is None
