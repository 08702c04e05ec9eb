"""The fleet actor from outside: connected to, created when missing, asked.

Importing this module imports Ray, which reads how to authenticate at once: set its environment first.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import RayError

from deploy.fleet.fleet import Fleet
from protocol.errors import NeighbourError, OperatorError
from protocol.ray_calls import FLEET, NAMESPACE, first_line, naming_ray_errors


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Be a driver of the cluster within the block. Raises: OperatorError when Ray does not answer."""
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, RayError) as error:
        raise OperatorError(f"Ray at {address} does not answer ({first_line(error)}).") from None
    try:
        yield
    finally:
        ray.shutdown()


def ensure_fleet(timeout_s: float) -> None:
    """Have the fleet actor run; it outlives this driver. Raises: OperatorError when it does not answer in time."""
    fleet = (
        ray.remote(Fleet)
        .options(name=FLEET, namespace=NAMESPACE, lifetime="detached", get_if_exists=True, num_cpus=0, max_restarts=-1)
        .remote()
    )
    ask(fleet.describe.remote(), timeout_s)


def describe_servers(timeout_s: float) -> list[dict[str, Any]]:
    """Return what the fleet says of its servers; [] when there is no fleet."""
    fleet = _find()
    servers: list[dict[str, Any]] = ask(fleet.describe.remote(), timeout_s) if fleet is not None else []
    return servers


def stop_servers(timeout_s: float) -> None:
    """Stop every rollout server in an orderly way, so that engines give back what they hold."""
    fleet = _find()
    if fleet is not None:
        ask(fleet.stop_all.remote(), timeout_s)


def ask(reference: Any, timeout_s: float) -> Any:
    """Return the fleet's answer. Raises: OperatorError when none came in time or the fleet failed."""
    try:
        with naming_ray_errors("the fleet", timeout_s):
            return ray.get(reference, timeout=timeout_s)
    except NeighbourError as error:
        raise OperatorError(f"The fleet {error.detail}.") from None


def _find() -> Any:
    try:
        return ray.get_actor(FLEET, namespace=NAMESPACE)
    except ValueError:
        return None
