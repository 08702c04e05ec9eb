"""The processes of one attempt: its coordinator and its learner ranks are placed, started and ended."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from learner.cluster.fleet import find_fleet
from learner.cluster.ray_door import call
from learner.cluster.servers import RayServer
from learner.coordinator.process import CoordinatorProcess
from learner.disk.model_folder import find_named_model
from learner.disk.shared_folder import shared_mark
from learner.plan.processes import Processes, Topology
from learner.rank.process import RankPlace
from protocol import failpoints
from protocol.errors import NeighbourError, OperatorError
from protocol.node.small_model_files import SmallFiles, read_small_files
from protocol.ray_calls import OUR_ACTOR, own_node_id
from protocol.settings.settings import Settings

# A rank imports torch and DeepSpeed before its first answer.
_IMPORT_S = 180.0


def place_coordinator(
    settings: Settings,
    folder: Path,
    run_id: str,
    last_step: int,
    host: str,
    model: Path,
    services: Mapping[str, str],
) -> Any:
    """Start the coordinator on this node, where run folder and model are. Returns its handle.

    last_step: step of the checkpoint that it resumes from, 0 for a new run. host: address of this node for its sockets.
    services: as of `CoordinatorProcess`.
    """
    here = NodeAffinitySchedulingStrategy(own_node_id(), soft=False)
    variables = _run_variables()
    environment = {"env_vars": variables} if variables else None
    options = {**OUR_ACTOR, "max_concurrency": 3, "scheduling_strategy": here, "runtime_env": environment}
    actor = ray.remote(**options)(CoordinatorProcess)
    return actor.remote(settings, folder, run_id, last_step, host, model, services)


def borrow_processes(ranks: Processes, coordinator: Any, cards: Sequence[str] = ()) -> Any:
    """Request processes of learner ranks from the fleet. Returns a Ray reference to their handles.

    The processes end with the coordinator. cards: as `shared_cards` returns them; empty: of their own.
    """
    nodes, num_gpus = [node.node_id for node in ranks.places], 0 if cards else ranks.num_gpus
    taken = ([coordinator], nodes, dict(ranks.resources), list(cards))
    return find_fleet().lend_processes.remote(ranks.count, num_gpus, *taken)


def shared_cards(ranks: Processes, servers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return for each rank the GPU that it shares, of the servers on its node; empty without GPUs.

    Raises: NeighbourError when a server is on another node than planned.
    """
    if not ranks.num_gpus:
        return []
    cards: dict[str, list[str]] = {}
    for server in servers:
        cards.setdefault(server["node_id"], []).extend(server["cards"])
    try:
        return [cards[node.node_id].pop(0) for node in ranks.places]
    except LookupError:
        where = ", ".join(f"{server['name']} on {server['node_ip']}" for server in servers)
        raise NeighbourError("the fleet", f"started servers on other nodes than their ranks: {where}") from None


def make_ranks(
    processes: Sequence[Any], topology: Topology, settings: Settings, folder: Path, model: Path
) -> "list[Rank]":
    """Return a learner rank for each process, in order, each with its place in the world.

    topology: the plan of the processes. model: folder of the policy.
    Raises: OperatorError naming a node that does not share the run folder.
    """
    files = _small_files(settings, model)
    named = zip(rank_names(topology), processes, strict=True)
    ranks = [Rank(number, name, process) for number, (name, process) in enumerate(named)]
    loading = [rank.load(settings, folder, files) for rank in ranks]
    for rank, reference in zip(ranks, loading, strict=True):
        call(reference, rank.name, _IMPORT_S)
    _check_shared(ranks, folder)
    host, port = call(ranks[0].ask("offer_address"), ranks[0].name)
    # All at once: each spends seconds on its imports.
    places = rank_places(topology, host, port)
    placing = [rank.ask("take_place", place) for rank, place in zip(ranks, places, strict=True)]
    for rank, reference in zip(ranks, placing, strict=True):
        call(reference, rank.name, _IMPORT_S)
    return ranks


def rank_places(topology: Topology, host: str, port: int) -> list[RankPlace]:
    """Return each rank's place, in order. host, port: where the ranks meet."""
    nodes = [node.node_ip for node in topology.ranks.places]
    return [RankPlace(number, len(nodes), host, port, nodes.count(node)) for number, node in enumerate(nodes)]


def rank_names(topology: Topology) -> list[str]:
    """Return each rank's name for people, in order; with its node on a cluster of several."""
    several = len(topology.nodes) > 1
    places = [f" on node {node.node_ip}" if several else "" for node in topology.ranks.places]
    return [f"learner rank {number}{place}" for number, place in enumerate(places)]


def _check_shared(ranks: "Sequence[Rank]", folder: Path) -> None:
    """Raise OperatorError when a rank does not see a file of this process in the run folder, or cannot write there."""
    with shared_mark(folder) as mark:
        references = [(rank, rank.ask("sees", mark)) for rank in ranks]
        answers = {f"learner rank {rank.number}": call(reference, rank.name) for rank, reference in references}
    missing = {who: node_ip for who, (node_ip, is_seen) in answers.items() if not is_seen}
    if missing:
        named = ", ".join(f"{who} on node {node_ip}" for who, node_ip in missing.items())
        raise OperatorError(
            f"The run folder {folder} is not shared with {named}: this node's files there are not seen, or nothing "
            "can be written. Set run.dir to a folder on a disk that all nodes with learner ranks share, or place the "
            "ranks on this node."
        )


def end(coordinator: Any, ranks: "Sequence[Rank]") -> None:
    """Kill a run's actors. The coordinator also ends with this process, and the ranks end with it."""
    for rank in ranks:
        rank.end()
    if coordinator is not None:
        ray.kill(coordinator)


class Rank:
    """A learner rank: a process of the fleet that loaded a `learner.rank.process.RankProcess`."""

    def __init__(self, number: int, name: str, process: Any) -> None:
        """name: for people."""
        self.number = number
        self.name = name
        self._process = process

    def load(self, settings: Settings, folder: Path, files: Mapping[str, SmallFiles]) -> Any:
        """Return a reference that is ready once the process has imported and made its RankProcess."""
        path = "learner.rank.process:RankProcess"
        return self._process.load.remote(path, _run_variables(), settings, folder, files, RayServer)

    def ask(self, method: str, *arguments: Any) -> Any:
        """Return a reference to the answer of a RankProcess's method."""
        return self._process.call.remote(method, *arguments)

    def end(self) -> None:
        ray.kill(self._process)


def _run_variables() -> dict[str, str]:
    """Return the variables of this process's environment that hold for the whole run."""
    return {name: os.environ[name] for name in (failpoints.VARIABLE,) if os.environ.get(name)}


def _small_files(settings: Settings, model: Path) -> dict[str, SmallFiles]:
    """Return the small files of each model of a run, by the setting that names it."""
    named = {"critic.model": settings.critic.model, "reference.model": settings.reference.model}
    folders = {setting: find_named_model(setting, name) for setting, name in named.items() if name}
    return {
        setting: read_small_files(folder, with_code=settings.policy.trust_remote_code)
        for setting, folder in {"policy.model": model, **folders}.items()
    }
