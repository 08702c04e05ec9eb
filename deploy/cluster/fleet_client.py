"""Calls to the fleet actor, and the connection to Ray that they need.

Importing this module imports Ray, which reads its environment at once: call `connect_environment` first.
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
from protocol.one_line import first_line
from protocol.ray_calls import FLEET, NAMESPACE, OUR_ACTOR, naming_ray_errors, own_node_id

_CONNECT_S = 5.0


@contextmanager
def connection(address: str, node_ip: str | None = None) -> Iterator[None]:
    """Connect to the cluster as a Ray driver within the block; a nested block uses the outer connection.

    node_ip: this node's address in the cluster. With None Ray guesses, and on a machine with several addresses it may
    use another node's Ray.
    Raises: OperatorError when Ray does not answer.
    """
    if ray.is_initialized():
        yield
        return
    try:
        # Without a head ray.init waits two minutes, then ends this process without an exception.
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
    """Start the fleet actor on this node, the head, unless it runs. It outlives this driver.

    It is pinned to the head: on another node Ray might restart it with other code.
    Raises: OperatorError when it does not answer in time.
    """
    fleet = ray.remote(Fleet).options(**detached_here(FLEET)).remote()
    ask(fleet.describe.remote(), timeout_s)


def detached_here(name: str) -> dict[str, Any]:
    """Return Ray's options of an actor on this node that outlives this driver."""
    return {
        **OUR_ACTOR,
        "name": name,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "max_restarts": -1,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(own_node_id(), soft=False),
    }


def describe_servers(timeout_s: float) -> list[dict[str, Any]]:
    """Return the fleet's facts of its servers; [] without a fleet."""
    fleet = find_actor(FLEET)
    servers: list[dict[str, Any]] = ask(fleet.describe.remote(), timeout_s) if fleet is not None else []
    return servers


def describe_fleet(timeout_s: float) -> dict[str, Any] | None:
    """Return the fleet's FleetInfo; None without a fleet."""
    fleet = find_actor(FLEET)
    return ask(fleet.describe_self.remote(), timeout_s) if fleet is not None else None


def stop_servers(timeout_s: float) -> None:
    """Stop every rollout server in order, so that engines free their memory."""
    fleet = find_actor(FLEET)
    if fleet is not None:
        ask(fleet.stop_all.remote(), timeout_s)


def ask(reference: Any, timeout_s: float, who: str = "fleet") -> Any:
    """Return an actor's answer. Raises: OperatorError naming the actor when it failed or was late."""
    try:
        with naming_ray_errors(f"the {who}", timeout_s):
            return ray.get(reference, timeout=timeout_s)
    except NeighbourError as error:
        raise OperatorError(f"The {who} {error.detail}.") from None


def find_actor(name: str) -> Any:
    """Return the handle of one of our actors; None without it."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None
