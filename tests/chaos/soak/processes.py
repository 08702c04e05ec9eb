"""The processes of a cluster, by kind: of this node, or of hosts that are namespaces of this machine."""

import os
import signal
from collections.abc import Iterable, Mapping

import psutil

from deploy.cluster.ray_processes import ray_processes
from deploy.node.home import Home
from deploy.node.processes import find
from protocol.errors import OperatorError
from protocol.node.home import read_cluster
from tests.fakes.process_facts import title_of

_NOT_ITSELF = ("bash ", "/bin/bash ", "sh ", "/bin/sh ", "nsenter ", "env ")
# How Ray and vLLM title the processes of each kind.
_TITLES = {
    "server": "ray::RolloutServer",
    "engine": "VLLM::EngineCore",
    "coordinator": "ray::CoordinatorProcess",
    "rank": "ray::StandbyProcess",
    "fleet": "ray::Fleet",
    "keeper": "ray::Keeper",
}
_SERVICES = ("retriever", "reward")
_SERVICE_MODULES = {"retriever": "-m retriever.serve ", "reward": "-m rewards.serve "}
RAY = "raylet"
# All that are ours; Ray's own process of a node is not.
OURS = (*_TITLES, *_SERVICES)
# What a host has besides: the command that keeps its node, and the one that a user has given.
COMMANDS = {"node": "-m deploy.cluster start ", "command": "-m learner.run "}
GCS = "gcs"  # its memory is looked at; it is never a victim
# Ray's processes but its GCS, without which there is no cluster: three of each host, and three of the head.
RAYS = {
    RAY: f"/{RAY}/{RAY} ",
    "dashboard_agent": "ray::DashboardAgent",
    "environment_agent": "ray::RuntimeEnvAgent",
    "dashboard": "/ray/dashboard/dashboard.py ",
    "monitor": "/ray/autoscaler/_private/monitor.py ",
    "client_server": "-m ray.util.client.server ",
}


def processes(home: Home) -> Mapping[str, list[psutil.Process]]:
    """Return them by kind; kinds of which there are none now are absent."""
    found: dict[str, list[psutil.Process]] = {}
    for process in ray_processes(home):
        if (kind := _kind(title_of(process))) is not None:
            found.setdefault(kind, []).append(process)
    try:
        records = read_cluster().processes
    except OperatorError:  # it is being started again
        return found
    services = {record.name: find(record) for record in records if record.name in _SERVICES}
    return {**found, **{name: [process] for name, process in services.items() if process is not None}}


def processes_of_hosts(first: Iterable[psutil.Process]) -> Mapping[str, list[psutil.Process]]:
    """Return them by kind, Ray's and commands too. first: of each host the one that buries all others of it."""
    hosts = {space for process in first if (space := _space(process.pid)) is not None}
    parts = {**_SERVICE_MODULES, **COMMANDS, **RAYS, GCS: "/gcs/gcs_server "}
    found: dict[str, list[psutil.Process]] = {}
    # By the host's numbering: what was begun from outside of a host, as by nsenter, has its parent there.
    for process in (each for each in psutil.process_iter() if _space(each.pid) in hosts):
        title = f"{title_of(process)} "
        others = (kind for kind, part in parts.items() if part in title)
        # A shell that repeats a command has it in its own title.
        if not title.startswith(_NOT_ITSELF) and (kind := _kind(title) or next(others, None)) is not None:
            found.setdefault(kind, []).append(process)
    return found


def signal_if_there(process: psutil.Process, number: signal.Signals) -> bool:
    """Return whether it was there to be told."""
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return False
    return True


def _space(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}/ns/pid").st_ino
    except OSError:
        return None  # it has ended


def _kind(title: str) -> str | None:
    if f"/{RAY}/{RAY} " in title:
        return RAY
    return next((kind for kind, beginning in _TITLES.items() if title.startswith(beginning)), None)
