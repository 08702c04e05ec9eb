"""The fleet actor from outside: connected to, created when missing, asked.

Importing this module imports Ray, which reads how to authenticate at once: set its environment first.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from deploy.cluster.ray_processes import NAMESPACE
from deploy.fleet.fleet import FLEET, Fleet
from protocol.errors import OperatorError


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Be a driver of the cluster within the block. Raises: OperatorError when Ray does not answer."""
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, RayError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise OperatorError(f"Ray at {address} does not answer ({reason}).") from None
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
        return ray.get(reference, timeout=timeout_s)
    except GetTimeoutError:
        raise OperatorError(f"The fleet did not answer within {timeout_s:g} s.") from None
    except RayError as error:
        raise OperatorError(f"The fleet failed: {str(error).strip().splitlines()[-1]}") from None


def _find() -> Any:
    try:
        return ray.get_actor(FLEET, namespace=NAMESPACE)
    except ValueError:
        return None
