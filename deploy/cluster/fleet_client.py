"""The fleet actor from outside: connected to, created when missing, asked.

Importing this module imports Ray, which reads how to authenticate at once: set its environment first.
"""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deploy.fleet.fleet import Fleet
from protocol.addresses import host_and_port
from protocol.errors import NeighbourError, OperatorError
from protocol.ray_calls import FLEET, NAMESPACE, OUR_ACTOR, first_line, naming_ray_errors

_CONNECT_S = 5.0


@contextmanager
def connected(address: str, node_ip: str | None = None) -> Iterator[None]:
    """Be a driver of the cluster within the block; a block inside another one's changes nothing.

    node_ip: this node's address in the cluster; None: Ray's guess, which on a machine of several addresses may be
    another one, and another node's Ray is then taken for this one's.

    Raises: OperatorError when Ray does not answer.
    """
    if ray.is_initialized():
        yield
        return
    try:
        # Asked first: for a head that is gone Ray waits two minutes, then ends this process without an exception.
        socket.create_connection(host_and_port(address), timeout=_CONNECT_S).close()
        options = {"_node_ip_address": node_ip} if node_ip is not None else {}
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR", **options)
    except (OSError, RuntimeError, RayError) as error:
        raise OperatorError(f"Ray at {address} does not answer ({first_line(error)}).") from None
    try:
        yield
    finally:
        ray.shutdown()


def ensure_fleet(timeout_s: float) -> None:
    """Have the fleet actor run on this node, the head; it outlives this driver.

    It is pinned to the head: on another node Ray might restart it with other code.
    Raises: OperatorError when it does not answer in time.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {"name": FLEET, "namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True}
    options |= {**OUR_ACTOR, "max_restarts": -1, "scheduling_strategy": here}
    fleet = ray.remote(Fleet).options(**options).remote()
    ask(fleet.describe.remote(), timeout_s)


def describe_servers(timeout_s: float) -> list[dict[str, Any]]:
    """Return what the fleet says of its servers; [] when there is no fleet."""
    fleet = _find()
    servers: list[dict[str, Any]] = ask(fleet.describe.remote(), timeout_s) if fleet is not None else []
    return servers


def describe_fleet(timeout_s: float) -> dict[str, Any] | None:
    """Return what the fleet says of itself, a FleetInfo; None when there is no fleet."""
    fleet = _find()
    return ask(fleet.describe_self.remote(), timeout_s) if fleet is not None else None


def stop_servers(timeout_s: float) -> None:
    """Stop every rollout server in an orderly way, so that engines give back what they hold."""
    fleet = _find()
    if fleet is not None:
        ask(fleet.stop_all.remote(), timeout_s)


def stop_server(name: str, timeout_s: float) -> None:
    """Stop one rollout server in an orderly way. Raises: OperatorError when it does not end."""
    fleet = _find()
    if fleet is not None:
        ask(fleet.remove.remote(name), timeout_s)


def ask(reference: Any, timeout_s: float, who: str = "fleet") -> Any:
    """Return an actor's answer. Raises: OperatorError naming it when none came in time or it failed."""
    try:
        with naming_ray_errors(f"the {who}", timeout_s):
            return ray.get(reference, timeout=timeout_s)
    except NeighbourError as error:
        raise OperatorError(f"The {who} {error.detail}.") from None


def _find() -> Any:
    try:
        return ray.get_actor(FLEET, namespace=NAMESPACE)
    except ValueError:
        return None
