"""The learner's one door to Ray: connect to the cluster, place coordinator and ranks, reach the rollout servers.

Used by the driver and, for the servers, by rank 0. Ray carries control calls only: no trajectories, no weights.
"""

import contextlib
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from learner.coordinator_process import CoordinatorProcess
from learner.rank_place import RankPlace
from protocol import failpoints
from protocol.code_digest import FLEET_ROOMS, code_digest
from protocol.errors import NeighbourError, OperatorError
from protocol.home import ClusterState
from protocol.run_spec import EngineRequest, RunSpec
from protocol.settings import Settings

FLEET = "sluice-fleet"
_CONNECT_S = 5.0
_CALL_S = 30.0
_RETRY_S = 0.1
_REASON_LENGTH = 300
# A rank imports torch and DeepSpeed before its first answer.
_IMPORT_S = 180.0


def connect(cluster: ClusterState) -> None:
    """Join the running cluster as a driver. Raises: OperatorError when Ray does not answer."""
    try:
        # Asked first: for a head that is gone Ray waits two minutes, then ends this process without an exception.
        host, _, port = cluster.ray_address.rpartition(":")
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
        ray.init(address=cluster.ray_address, namespace=cluster.namespace, log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, RayError) as error:
        raise OperatorError(
            f"Ray at {cluster.ray_address} does not answer ({_first_line(error)}). "
            "Start it with deploy/start_cluster.sh."
        ) from None


def num_gpus() -> int:
    """Return the GPUs of the whole cluster."""
    return int(ray.cluster_resources().get("GPU", 0))


def renew_fleet() -> bool:
    """Have a fleet that was started with other code than this be started anew; warm servers of this code stay.

    Returns whether that was needed. Raises: OperatorError when a run lives on processes that it lent, or when it comes
    back with other code again; NeighbourError when it does not come back.
    """
    code, before = code_digest(FLEET_ROOMS), call(_fleet().describe_self.remote(), "the fleet")
    if before["code"] == code:
        return False
    if before["is_lending"]:
        raise OperatorError(
            "The code has changed since the cluster's fleet was started, and another run is using that fleet. "
            "Wait until the run has ended; this command then has the fleet start anew."
        )
    ray.kill(_fleet(), no_restart=False)  # Ray starts it again: in a new process, which imports what is there now
    now = _await_other_fleet(before["pid"])
    if now["code"] != code:
        raise OperatorError(
            f"The fleet on the cluster's head node runs other code than this checkout (digest {now['code']}, here "
            f"{code}). Bring both to the same version, or start the run on the head node."
        )
    return True


def place_coordinator(
    settings: Settings, folder: Path, run_id: str, last_step: int, host: str, vocab_size: int | None
) -> Any:
    """Start the coordinator on this node, where the run folder is. Returns its handle."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    environment = {"env_vars": _passed_on()} if _passed_on() else None
    options = {"num_cpus": 0, "max_concurrency": 3, "scheduling_strategy": here, "runtime_env": environment}
    actor = ray.remote(**options)(CoordinatorProcess)
    return actor.remote(settings, folder, run_id, last_step, host, vocab_size)


def borrow_processes(settings: Settings, coordinator: Any, use_gpus: bool) -> Any:
    """Ask the fleet for processes that become learner ranks; they end with the coordinator. Returns a reference."""
    return _fleet().lend_processes.remote(settings.learner.num_ranks, use_gpus, [coordinator])


def make_ranks(processes: Sequence[Any], settings: Settings, folder: Path, model: Path) -> "list[Rank]":
    """Make a learner rank of each process and tell each its place in their world. Returns them in their order."""
    ranks = [Rank(number, process) for number, process in enumerate(processes)]
    becoming = [rank.become(settings, folder, model) for rank in ranks]
    for rank, reference in zip(ranks, becoming, strict=True):
        call(reference, rank.name, _IMPORT_S)
    host, port = call(ranks[0].ask("offer_address"), ranks[0].name)
    # All at once: each spends seconds on its imports.
    placing = [rank.ask("take_place", RankPlace(rank.number, len(ranks), host, port)) for rank in ranks]
    for rank, reference in zip(ranks, placing, strict=True):
        call(reference, rank.name, _IMPORT_S)
    return ranks


def ensure_servers(engine: EngineRequest, num_servers: int) -> Any:
    """Ask the fleet for warm or new rollout servers. Returns a reference to a list of {name, node_ip, warm}."""
    return _fleet().ensure.remote(engine.model_dump(mode="json"), num_servers)


def check_services(spec: RunSpec) -> None:
    """Have the fleet ask every reward endpoint and the retriever, before anything slow starts."""
    call(_fleet().check_services.remote(spec.model_dump(mode="json")), "the fleet", 60.0)


def attach_servers(names: Sequence[str], spec: RunSpec) -> None:
    """Tell every rollout server of the run; returns when all have answered. Raises: what the first of them raised."""
    body = spec.model_dump(mode="json")
    for name, reference in [(name, server(name).attach.remote(body)) for name in names]:
        call(reference, name, 120.0)


def detach_servers(names: Sequence[str]) -> None:
    """Have the servers forget the run and stay warm. One that does not answer is left to the fleet."""
    with contextlib.suppress(RayError):
        references = [server(name).detach.remote() for name in names if is_alive(name)]
        ray.wait(references, num_returns=len(references), timeout=10.0) if references else None


def ask(name: str, method: str, *arguments: Any) -> Any:
    """Return a reference to a rollout server's answer; a server that is gone answers by failing."""
    return getattr(server(name), method).remote(*arguments)


def is_done(reference: Any) -> bool:
    """Return whether a call has ended, well or not."""
    return bool(ray.wait([reference], timeout=0)[0])


def server(name: str) -> Any:
    """Return the handle of a rollout server. Raises: NeighbourError when no such server runs."""
    try:
        return ray.get_actor(name, namespace="sluice")
    except ValueError:
        raise NeighbourError(name, "is not running") from None


def is_alive(name: str) -> bool:
    try:
        server(name)
    except NeighbourError:
        return False
    return True


def call(reference: Any, who: str, timeout_s: float = _CALL_S) -> Any:
    """Return a remote call's result.

    Raises: what the callee raised, unwrapped, when it says what is wrong; NeighbourError naming `who` when it died, did
    not answer in time, or failed by a fault of its own, whose traceback is then the NeighbourError's cause.
    """
    try:
        return ray.get(reference, timeout=timeout_s)
    except GetTimeoutError:
        raise NeighbourError(who, f"did not answer within {timeout_s:g} s") from None
    except RayTaskError as error:
        if isinstance(error.cause, OperatorError | NeighbourError):
            raise error.cause from None
        reason = " ".join(str(error.cause).split())[:_REASON_LENGTH]
        raise NeighbourError(who, f"failed: {type(error.cause).__name__}: {reason}") from error
    except (ActorDiedError, ActorUnavailableError) as error:
        raise NeighbourError(who, f"died: {_first_line(error)}") from None
    except RayError as error:
        raise NeighbourError(who, f"failed: {_first_line(error)}") from error


def wait_any(references: Mapping[Any, str], timeout_s: float) -> list[str]:
    """Return who of these has finished; raise what any of them raised. Blocks at most timeout_s."""
    done, _ = ray.wait(list(references), num_returns=1, timeout=timeout_s) if references else ([], [])
    finished = []
    for reference in done:
        call(reference, references[reference])
        finished.append(references[reference])
    return finished


def end(coordinator: Any, ranks: "Sequence[Rank]") -> None:
    """Kill a run's actors. Those that could not be killed end with this process: the coordinator, and so the ranks."""
    for rank in ranks:
        rank.end()
    if coordinator is not None:
        ray.kill(coordinator)


def disconnect() -> None:
    """Leave the cluster; what this process started there ends, but for what is detached."""
    ray.shutdown()


class Rank:
    """A learner rank: a process of the fleet's that has become a `learner.rank_process.RankProcess`."""

    def __init__(self, number: int, process: Any) -> None:
        self.number = number
        self.name = f"learner rank {number}"
        self._process = process

    def become(self, settings: Settings, folder: Path, model: Path) -> Any:
        path = "learner.rank_process:RankProcess"
        return self._process.become.remote(path, _passed_on(), settings, folder, model, RayServer)

    def ask(self, method: str, *arguments: Any) -> Any:
        """Return a reference to the answer of a RankProcess's method."""
        return self._process.invoke.remote(method, *arguments)

    def end(self) -> None:
        ray.kill(self._process)


class RayServer:
    """A rollout server's weight controls, as `learner.weight_push` wants them; each call is one Ray call."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._handle = server(name)

    async def join(self, init: dict[str, Any], timeout_s: float) -> None:
        await self._handle.join_weights.remote(init, timeout_s)

    async def pause(self) -> None:
        await self._handle.pause.remote()

    async def receive(self, update: dict[str, Any]) -> None:
        await self._handle.receive.remote(update)

    async def commit(self, version: int, digest: str) -> None:
        await self._handle.commit.remote(version, digest)

    async def resume(self) -> None:
        await self._handle.resume.remote()

    async def probe(self, tokens: list[int]) -> list[float]:
        logprobs: list[float] = await self._handle.probe.remote(tokens)
        return logprobs

    async def leave(self) -> None:
        await self._handle.leave.remote()


def _passed_on() -> dict[str, str]:
    """Return what of this process's environment concerns the whole run: the cluster's processes have their own."""
    return {name: os.environ[name] for name in (failpoints.VARIABLE,) if os.environ.get(name)}


def _await_other_fleet(old_pid: int) -> Any:
    """Return what the fleet says of itself once it is another process. Raises: NeighbourError when that takes long."""
    deadline = time.monotonic() + _CALL_S
    while time.monotonic() < deadline:
        with contextlib.suppress(NeighbourError):  # between the two nobody answers
            now = call(_fleet().describe_self.remote(), "the fleet")
            if now["pid"] != old_pid:
                return now
        time.sleep(_RETRY_S)
    raise NeighbourError("the fleet", f"was not started anew within {_CALL_S:g} s")


def _fleet() -> Any:
    try:
        return ray.get_actor(FLEET, namespace="sluice")
    except ValueError:
        raise OperatorError(
            "The cluster has no fleet. Run deploy/start_cluster.sh again: it starts what is missing."
        ) from None


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
