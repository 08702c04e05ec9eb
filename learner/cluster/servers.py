"""Calls of a run's command and its ranks to the rollout servers, through Ray."""

import contextlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from learner.cluster.fleet import find_fleet
from learner.cluster.ray_door import call, is_done
from learner.plan.processes import Processes
from protocol.errors import NeighbourError
from protocol.ray_calls import NAMESPACE
from protocol.settings.run_spec import EngineRequest, RunSpec
from protocol.weights.controls import FIRST_TURN, VERBS, learner_name

_CALL_S = 120.0
_DETACH_S = 10.0


def ensure_servers(engine: EngineRequest, planned: Processes, may_be_late: bool = False) -> Any:
    """Ask the fleet for warm or new servers; return a reference to a list of `ServerInfo`.

    may_be_late: when one server is ready, the others are returned before their engines start.
    """
    request, nodes = engine.model_dump(), [node.node_id for node in planned.places]
    resources = dict(planned.resources)
    return find_fleet().ensure.remote(request, planned.count, planned.num_gpus, nodes, resources, may_be_late)


def shared_retrievers(servers: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the retriever addresses of these servers' nodes, without repeats."""
    return tuple(sorted({str(url) for server in servers if (url := server["shared_retriever_url"])}))


def attach_servers(names: Sequence[str], spec: RunSpec) -> dict[str, dict[str, Any]]:
    """Attach the servers to the run; return each server's reply by name.

    A reply has `content_hash`, the digest of the server's search index ("" if unknown), and in a run with agents
    `base_url`, their address. Blocks up to 120 s per server. Raises: the first error.
    """
    body = spec.model_dump(mode="json")
    references = {name: server(name).attach.remote(body) for name in names}
    return {name: call(reference, name, _CALL_S)["run"] for name, reference in references.items()}


def put_to_sleep(names: Sequence[str], spec: RunSpec) -> None:
    """Make the servers free their devices. Blocks up to 120 s per server. Raises: the first error."""
    attempt = (learner_name(spec.run_id, spec.incarnation), FIRST_TURN)
    references = {name: server(name).sleep.remote(attempt) for name in names}
    for name, reference in references.items():
        call(reference, name, _CALL_S)


def detach_servers(names: Sequence[str]) -> None:
    """Detach the servers, which stay warm; ignore one that does not answer."""
    with contextlib.suppress(RayError):
        references = [server(name).detach.remote() for name in names if is_alive(name)]
        if references:
            ray.wait(references, num_returns=len(references), timeout=_DETACH_S)


def server(name: str) -> Any:
    """Return the handle of a rollout server. Raises: NeighbourError when no such server runs."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        raise NeighbourError(name, "is not running") from None


def is_alive(name: str) -> bool:
    try:
        server(name)
    except NeighbourError:
        return False
    return True


class ServerCalls:
    """A run's calls to its servers, the coordinator and rank 0. None blocks."""

    def __init__(self, engine: EngineRequest, coordinator: Any, push_to: Callable[[tuple[str, ...]], Any]) -> None:
        """engine: start options of every server. push_to: makes rank 0 push weights to these servers."""
        self.push_to = push_to
        self._engine = engine
        self._coordinator = coordinator

    def ask(self, name: str, method: str, *arguments: Any) -> Any:
        """Call a server's method; return a reference to the reply."""
        if method == "start":  # Ray may have restarted its process on a node that lacks the model's files
            arguments = (self._engine.files,)
        return getattr(server(name), method).remote(*arguments)

    def is_done(self, reference: Any) -> bool:
        """Return whether the reply or an error has arrived."""
        return is_done(reference)

    def result(self, reference: Any, name: str) -> Any:
        """Return the reply. Raises: the server's error; NeighbourError when it died."""
        return call(reference, name)

    def lose(self, name: str, reason: str) -> None:
        """Recall the leases of a crashed server."""
        self._coordinator.lose_server.remote(name, reason)


class RayServer:
    """A rollout server's `ServerControls` as Ray calls."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._handle = server(name)


def _forward(verb: str) -> Callable[..., Coroutine[Any, Any, Any]]:
    async def call(server: RayServer, *arguments: Any) -> Any:
        return await getattr(server._handle, verb).remote(*arguments)

    return call


for _verb in VERBS:
    setattr(RayServer, _verb, _forward(_verb))
