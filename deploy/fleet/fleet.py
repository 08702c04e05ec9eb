"""The fleet: a detached Ray actor that keeps rollout servers warm between runs, and lends warm processes for ranks.

It has no memory: the servers are read from Ray at each call, so a restarted fleet knows as much as the one before.
"""

import asyncio
import os
from collections.abc import Mapping
from typing import Any, TypedDict

import ray

from deploy.fleet.processes import ActorPlace, StandbyPool, places
from deploy.fleet.servers import (
    ANSWER_S,
    STATUS_S,
    LongestWait,
    call_server,
    describe_server,
    find_cause,
    host_class,
    remove_server,
    server_names,
    stop_server,
)
from protocol.errors import NeighbourError, OperatorError
from protocol.node.identity import FLEET_ROOMS, code_digest
from protocol.ray_calls import NAMESPACE, OUR_ACTOR, SERVER_PREFIX
from protocol.settings.run_spec import EngineRequest, RunSpec
from protocol.waits import all_of

# A killed run returns its borrowed processes a moment later.
_RETURN_S = 20.0
_PLACE_S = 120.0  # time for Ray to start a process
# Ray replaces a process that ended within seconds, where its node has room.
_AWAY_S = 20.0
# Time to load a model of hundreds of GB; the waiting driver has its own deadline.
_START_S = 3600.0


class ServerInfo(TypedDict):
    """A rollout server."""

    name: str
    node_ip: str  # address of its node; "": it has no process yet
    node_id: str  # Ray's name of its node; "": it has no process yet
    warm: bool  # it ran before, with this very engine
    is_started: bool  # False: the caller has to start its engine
    shared_retriever_url: str | None  # for other nodes; None: not shared
    cards: list[str]  # its GPUs by the numbers of its node


class FleetInfo(TypedDict):
    """The fleet itself."""

    pid: int
    code: str  # digest of its code
    is_lending: bool  # a run uses processes that would end with it


class Fleet:
    """All methods run in one event loop. server_class: `module:Class` of the rollout server."""

    def __init__(self, server_class: str = "rollout.server:RolloutServer") -> None:
        self._server_class = server_class
        self._code = code_digest(FLEET_ROOMS)
        self._changing = asyncio.Lock()
        self._wait = LongestWait()
        self._standby = StandbyPool()
        self._standby.fill(1)

    async def describe_self(self) -> FleetInfo:
        """Return its process, its code and whether it lends."""
        return FleetInfo(pid=os.getpid(), code=self._code, is_lending=self._standby.is_lending)

    async def describe_wait(self, longest_s: float) -> str:
        """Return the longest wait for a server in words; empty while all are short.

        longest_s: seconds since the run's start; a longer wait is reported as that long.
        """
        return self._wait.describe(longest_s)

    async def admit(self, borrower: list[Any]) -> None:
        """Let a run use this cluster and change its servers while the actor in this list lives.

        Raises: OperatorError when another run uses it and does not end within 20 s.
        """
        if not await self._standby.admit(borrower[0], _RETURN_S):
            names = sorted({server["run"]["run_id"] for server in await self.describe() if server.get("run")})
            raise OperatorError(
                f"Another run ({', '.join(names) or 'not attached yet'}) is using this cluster. Wait for its end, or "
                "end it on its machine with sluice runs stop."
            )

    async def lend_processes(
        self,
        num_processes: int,
        num_gpus: float,
        borrower: list[Any],
        nodes: list[str] | None = None,
        resources: dict[str, float] | None = None,
        cards: list[str] | None = None,
    ) -> list[Any]:
        """Return handles of `StandbyProcess` actors, which end with the one actor in `borrower`.

        num_gpus, nodes, resources: as for `ensure`. cards: the GPU of a server that each uses too. Raises: as `admit`.
        """
        await self.admit(borrower)
        return await self._standby.lend(places(num_processes, num_gpus, nodes, resources, cards))

    async def ensure(
        self,
        spec: dict[str, Any],
        num_servers: int,
        num_gpus: float = 0,
        nodes: list[str] | None = None,
        resources: dict[str, float] | None = None,
        may_be_late: bool = False,
    ) -> list[ServerInfo]:
        """Return num_servers ready servers with the engine of `spec`, an EngineRequest.

        Servers with this engine in a matching place stay warm; others are stopped. Missing servers and engines start in
        parallel. num_gpus: GPUs of each; without them Ray waits for ever. nodes: Ray's name of each server's node;
        None: over all nodes. resources: custom resources of each. may_be_late: when one server is ready, the others are
        returned before their engines start.
        Raises: OperatorError with a cure; NeighbourError with the end of the engine's log. Started servers stay warm.
        """
        request = EngineRequest.model_validate(spec)
        fingerprint = request.fingerprint()
        async with self._changing:
            there = await asyncio.gather(*(self._describe_one(name, _AWAY_S) for name in server_names()))
            alike = [server for server in there if _may_have_engine(server, fingerprint)]
            kept, empty = _in_places(alike, places(num_servers, num_gpus, nodes, resources))
            names = [str(server["name"]) for server in kept]
            await asyncio.gather(*(self._end(name) for name in server_names() if name not in names))
            infos = [_info(str(server["name"]), server, is_warm=True) for server in kept if server["is_alive"]]
            cold = [str(server["name"]) for server in kept if not server["is_alive"]]
            free = (name for number in range(num_servers) if (name := f"{SERVER_PREFIX}{number}") not in names)
            missing = dict(zip(free, empty, strict=False))
            if may_be_late and infos:
                for name, place in missing.items():
                    self._make(name, request, place)
                late = await asyncio.gather(*map(self._describe_one, (*cold, *missing)))
                infos += [_info(server["name"], server, is_warm=False, is_started=False) for server in late]
                return _in_order(infos)
            starts = [self._start_engine(name, request.files) for name in cold]
            starts += [self._start(name, request, place) for name, place in missing.items()]
            infos += await all_of(starts)
        return _in_order(infos)

    async def describe(self) -> list[dict[str, Any]]:
        """Return each server's `describe()` with node_ip, pid and log; is_alive is False when it does not answer."""
        return list(await asyncio.gather(*(self._describe_one(name, answer_s=STATUS_S) for name in server_names())))

    async def check_services(self, run: dict[str, Any], row: dict[str, Any] | None = None) -> dict[str, str]:
        """Ask the reward services and the retriever of a run (a RunSpec) once; return `Services.digests`.

        Raises: NeighbourError, OperatorError or SettingsError with a cure.
        """
        # Imported late: a fleet must start even when a room of the checkout is broken.
        from rollout.neighbours.node import this_node
        from rollout.neighbours.services import Services

        async with Services(RunSpec.model_validate(run), this_node()) as services:
            await services.check(row)
            digests: dict[str, str] = services.digests
        return digests

    async def stop_all(self) -> None:
        """Stop every server and the standby processes; returns when all servers are gone."""
        self._standby.end()
        async with self._changing:
            await asyncio.gather(*(self._end(name) for name in server_names()))

    async def _start(self, name: str, request: EngineRequest, place: ActorPlace) -> ServerInfo:
        """Start one server. Raises: the error of its start; nothing of it is left then."""
        self._make(name, request, place)
        return await self._start_engine(name, request.files, place.describe_node())

    def _make(self, name: str, request: EngineRequest, place: ActorPlace) -> None:
        """Have Ray make a server's process."""
        actor = ray.remote(host_class(self._server_class)).options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            **OUR_ACTOR,
            max_restarts=-1,
            max_concurrency=1000,
            **place.options("SPREAD"),
        )
        actor.remote(name, request.without_files().model_dump())

    async def _start_engine(self, name: str, files: Mapping[str, bytes], where_to: str = "") -> ServerInfo:
        """Start the engine of a server, once it has a process. Raises: as `_start` does."""
        try:
            handle = ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:
            raise NeighbourError(name, "did not start: its process has ended") from None
        where: dict[str, Any] = {"log": ""}
        try:
            with self._wait.waiting_for(name, f"have a process{where_to}"):
                where = await call_server(name, handle.where.remote(), _PLACE_S)
            with self._wait.waiting_for(name, f"load its model on node {where['node_ip']}"):
                await call_server(name, handle.start.remote(files), _START_S)
        except NeighbourError as error:
            reported = error.detail if error.boundary == name else str(error)
            cause = (await find_cause(handle, reported)).rstrip(".")
            await remove_server(name)
            raise NeighbourError(name, f"did not start: {cause}. Log: {where['log'] or 'none yet'}") from None
        except BaseException:
            await remove_server(name)
            raise
        return _info(name, where, is_warm=False)

    async def _end(self, name: str) -> None:
        with self._wait.waiting_for(name, "end"):
            await stop_server(name)

    async def _describe_one(self, name: str, away_s: float = 0.0, answer_s: float = ANSWER_S) -> dict[str, Any]:
        with self._wait.waiting_for(name, "answer"):
            return await describe_server(name, away_s, answer_s)


def _info(name: str, where: dict[str, Any], is_warm: bool, is_started: bool = True) -> ServerInfo:
    """Return the info of a server. where: from its own answer."""
    shared = where["shared_retriever_url"]
    return ServerInfo(
        name=name,
        node_ip=str(where["node_ip"]),
        node_id=str(where.get("node_id") or ""),
        warm=is_warm,
        is_started=is_started,
        shared_retriever_url=shared,
        cards=list(where.get("cards", ())),
    )


def _in_order(infos: list[ServerInfo]) -> list[ServerInfo]:
    return sorted(infos, key=lambda info: int(info["name"].removeprefix(SERVER_PREFIX)))


def _in_places(alike: list[dict[str, Any]], wanted: list[ActorPlace]) -> tuple[list[dict[str, Any]], list[ActorPlace]]:
    """Return the servers that are in a wanted place, and the places without a server."""
    kept, left = [], list(wanted)
    for server in alike:
        found = (place for place in left if place.matches(server.get("node_id"), server.get("assigned", {})))
        if (place := next(found, None)) is not None:
            kept.append(server)
            left.remove(place)
    return kept, left


def _may_have_engine(server: dict[str, Any], fingerprint: str) -> bool:
    """Return whether a server has this engine, or is a process that can start it, because Ray restarted it."""
    return (bool(server["is_alive"]) or server.get("is_started") is False) and server.get("fingerprint") == fingerprint
