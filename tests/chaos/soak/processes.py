"""The processes of a cluster, by kind: of this node, or of hosts that are namespaces of this machine."""

from collections.abc import Iterable, Mapping

import psutil

from deploy.cluster.ray_processes import ray_processes
from deploy.node.home import Home
from deploy.node.processes import find
from protocol.errors import OperatorError
from protocol.node.home import read_cluster
from tests.fakes.process_facts import title_of

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
    """Return them by kind. first: of each host the process that all others of it descend from."""
    found: dict[str, list[psutil.Process]] = {}
    for process in (child for host in first for child in host.children(recursive=True)):
        title = title_of(process)
        services = (kind for kind, module in _SERVICE_MODULES.items() if module in title)
        if (kind := _kind(title) or next(services, None)) is not None:
            found.setdefault(kind, []).append(process)
    return found


def _kind(title: str) -> str | None:
    if f"/{RAY}/{RAY} " in title:
        return RAY
    return next((kind for kind, beginning in _TITLES.items() if title.startswith(beginning)), None)
