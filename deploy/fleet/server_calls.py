"""How the fleet reaches a rollout server: by its name, each call with a deadline."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import ray
from ray.util import list_named_actors

from protocol.errors import AwayError, NeighbourError, OperatorError
from protocol.ray_calls import NAMESPACE, SERVER_PREFIX, naming_ray_errors

_T = TypeVar("_T")
_ANSWER_S = 20.0
_STOP_S = 30.0
_AGAIN_S = 0.2


def server_names() -> list[str]:
    """Return the names of the rollout servers that Ray knows."""
    actors = list_named_actors(all_namespaces=True)
    names = [actor["name"] for actor in actors if actor["namespace"] == NAMESPACE]
    return sorted(name for name in names if name.startswith(SERVER_PREFIX))


async def describe_server(
    name: str, away_s: float = 0.0, find: Callable[[str], Any] = lambda name: ray.get_actor(name, namespace=NAMESPACE)
) -> dict[str, Any]:
    """Return its `describe()` with node_ip, pid and log; one that does not answer has is_alive False.

    away_s: so long one is waited for that Ray is about to start again; it may wait for room that no node has. find:
    returns the server's handle; raises ValueError where there is none.
    """
    unknown = {"name": name, "is_alive": False, "node_ip": "", "pid": 0, "log": "", "shared_retriever_url": None}
    deadline = time.monotonic() + away_s
    while True:
        try:
            handle = find(name)
            where = await call_server(name, handle.where.remote(), _ANSWER_S)
            return {**unknown, **where, **await call_server(name, handle.describe.remote(), _ANSWER_S)}
        except AwayError:
            if time.monotonic() >= deadline:
                return unknown
            await asyncio.sleep(_AGAIN_S)
        except (ValueError, NeighbourError):  # it ended since it was listed, or it does not answer
            return unknown


async def stop_server(name: str) -> None:
    """Stop a server in an orderly way, or without its consent."""
    # Suppressed: it is gone already, or cannot stop by itself and is ended below.
    with contextlib.suppress(ValueError, NeighbourError, OperatorError):
        await call_server(name, ray.get_actor(name, namespace=NAMESPACE).stop.remote(), _STOP_S)
    await remove_server(name)


async def remove_server(name: str) -> None:
    """End a server's process; returns when its name is free. Raises: NeighbourError when that takes too long."""
    try:
        ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)
        async with asyncio.timeout(_STOP_S):
            while name in server_names():
                await asyncio.sleep(0.02)  # Ray tells nobody when a name is free
    except ValueError:
        return
    except TimeoutError:
        raise NeighbourError(name, f"was still there {_STOP_S:g} s after it was ended") from None


async def log_tail(handle: Any) -> str:
    """Return the end of a server's log as a sentence that follows another."""
    try:
        tail = str(await call_server("", handle.log_tail.remote(), _ANSWER_S))
    except NeighbourError:
        return "."
    return f". The end of its log: {tail}." if tail else "."


async def call_server(name: str, reference: Awaitable[_T], timeout_s: float) -> _T:
    """Return a server's answer. Raises: as `naming_ray_errors` says."""
    with naming_ray_errors(name, timeout_s):
        async with asyncio.timeout(timeout_s):
            return await reference
