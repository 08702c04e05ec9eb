"""One rollout server of the fleet: its class as the fleet starts it, and calls by its name, each with a deadline."""

import asyncio
import contextlib
import gc
import os
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.util import list_named_actors

from deploy.fleet.processes import assigned_here
from protocol.addresses import name_interface
from protocol.errors import AwayError, NeighbourError, OperatorError
from protocol.node.home import read_cluster
from protocol.one_line import one_line
from protocol.ray_calls import NAMESPACE, SERVER_PREFIX, naming_ray_errors, own_node_id

_T = TypeVar("_T")
ANSWER_S = 20.0
STATUS_S = 4.0  # two answers of a server within the 10 s that a command waits for the fleet
_STOP_S = 30.0
_AGAIN_S = 0.2
_SHORT_S = 3.0  # shorter waits are not reported
_TAIL_LINES = 2
_CAUSE_LENGTH = 300
# The last line of a traceback, with or without the marks of a log before it: "ValueError: no room".
_EXCEPTION = re.compile(r"(?:^|[\s\]])((?:\w+\.)*\w*(?:Error|Exception): .+)")


class HostedServer:
    """The fleet's methods of a server, added to the methods of its class."""

    async def start(self, files: Mapping[str, bytes] | None = None) -> dict[str, object]:
        """Start as the server's class does, and exempt its memory from garbage collection.

        A collection of vLLM's and torch's objects finds nothing, and blocks all event loops for 0.1 s or more.
        """
        if ray.get_gpu_ids():  # before vLLM's workers start
            name_interface(ray.util.get_node_ip_address(), os.environ)
        described: dict[str, object] = await super().start(files)  # type: ignore[misc]
        if not gc.get_freeze_count():
            gc.collect()
            gc.freeze()
        return described

    async def describe(self) -> dict[str, object]:
        """Return the description by the server's class, with its node's address and Ray's name, and its GPUs."""
        described: dict[str, object] = await super().describe()  # type: ignore[misc]
        return {**described, **_place()}

    async def where(self) -> dict[str, object]:
        """Return the server's node, resources, process and log, and the shared address of its node's retriever."""
        where = {**_place(), "pid": os.getpid(), "log": os.readlink("/proc/self/fd/2"), "assigned": assigned_here()}
        try:
            return {**where, "shared_retriever_url": read_cluster().shared_retriever_url}
        except OperatorError:  # the cluster is being stopped
            return {**where, "shared_retriever_url": None}

    async def find_cause(self, reported: str) -> str:
        """Return the last exception in the logs of this process and its engine that `reported` does not have.

        Without one `reported`, and the last lines of the logs.
        """
        lines = [line for descriptor in (1, 2) for line in _log_lines(descriptor)]
        tail = " | ".join(lines[-_TAIL_LINES:])
        return last_exception(lines, reported, os.getpid()) or (
            f"{reported}. The end of its log: {tail}" if tail else reported
        )


def _place() -> dict[str, object]:
    """Return this actor's node, by address and Ray's name, and its GPUs by the numbers of the node."""
    cards = sorted(str(card) for card in ray.get_gpu_ids())  # Ray returns a set's order, another one after a restart
    return {"node_ip": ray.util.get_node_ip_address(), "node_id": own_node_id(), "cards": cards}


def host_class(server_class: str) -> type:
    """Return the class named `module:Class` with the methods of HostedServer."""
    module, _, name = server_class.partition(":")
    return type(name, (HostedServer, getattr(import_module(module), name)), {})


class LongestWait:
    """The calls to servers under way. clock: in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waits: dict[object, tuple[str, str, float]] = {}  # call -> server, purpose, seconds of the clock

    @contextmanager
    def waiting_for(self, name: str, purpose: str) -> Iterator[None]:
        """Count a call within the block. purpose: a verb phrase that follows "to"."""
        call = object()
        self._waits[call] = name, purpose, self._clock()
        try:
            yield
        finally:
            del self._waits[call]

    def describe(self, longest_s: float) -> str:
        """Return the longest wait in words and the number of others; empty while all are short.

        longest_s: seconds since the run's start; a longer wait is reported as that long.
        """
        if not self._waits:
            return ""
        name, purpose, since = min(self._waits.values(), key=lambda wait: wait[2])
        if (waited_s := min(self._clock() - since, longest_s)) < _SHORT_S:
            return ""
        others = f", and {len(self._waits) - 1} more" if len(self._waits) > 1 else ""
        return f"{name} to {purpose}, {waited_s:.0f} s{others}"


def server_names() -> list[str]:
    """Return the names of the rollout servers that Ray knows."""
    actors = list_named_actors(all_namespaces=True)
    names = [actor["name"] for actor in actors if actor["namespace"] == NAMESPACE]
    return sorted(name for name in names if name.startswith(SERVER_PREFIX))


async def describe_server(name: str, away_s: float, answer_s: float) -> dict[str, Any]:
    """Return its `describe()` with node_ip, pid and log; is_alive is False when it does not answer.

    away_s: longest wait for a server that Ray is about to restart; it may wait for room that no node has.
    answer_s: longest wait for each of two answers.
    """
    unknown = {"name": name, "is_alive": False, "node_ip": "", "pid": 0, "log": "", "shared_retriever_url": None}
    deadline = time.monotonic() + away_s
    while True:
        try:
            handle = ray.get_actor(name, namespace=NAMESPACE)
            where = await call_server(name, handle.where.remote(), answer_s)
            return {**unknown, **where, **await call_server(name, handle.describe.remote(), answer_s)}
        except AwayError:
            if time.monotonic() >= deadline:
                return unknown
            await asyncio.sleep(_AGAIN_S)
        except (ValueError, NeighbourError):  # it has ended since it was listed, or it does not answer
            return unknown


async def stop_server(name: str) -> None:
    """Stop a server in order; end its process when it does not stop."""
    with contextlib.suppress(ValueError, NeighbourError, OperatorError):
        await call_server(name, ray.get_actor(name, namespace=NAMESPACE).stop.remote(), _STOP_S)
    await remove_server(name)


async def remove_server(name: str) -> None:
    """End a server's process; returns when its name is free. Raises: NeighbourError after 30 s."""
    try:
        ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)
        async with asyncio.timeout(_STOP_S):
            while name in server_names():
                await asyncio.sleep(0.02)  # Ray sends no event when a name is free
    except ValueError:
        return
    except TimeoutError:
        raise NeighbourError(name, f"was still there {_STOP_S:g} s after it was ended") from None


async def find_cause(handle: Any, reported: str) -> str:
    """Return the cause of a failed start by the server's log; `reported` when it has none or does not answer."""
    try:
        return str(await call_server("", handle.find_cause.remote(reported), ANSWER_S)) or reported
    except NeighbourError:
        return reported


def last_exception(lines: Sequence[str], reported: str, parent_pid: int) -> str:
    """Return the last exception line of a log that `reported` does not have; "" without one.

    The lines of the engine's parent process are left out: it knows only that the engine failed.
    """
    of_engine = (line for line in lines if f"pid={parent_pid})" not in line)
    found = [one_line(match.group(1), _CAUSE_LENGTH) for line in of_engine if (match := _EXCEPTION.search(line))]
    return next((each for each in reversed(found) if each not in reported), "")


async def call_server(name: str, reference: Awaitable[_T], timeout_s: float) -> _T:
    """Return a server's answer. Raises: as `naming_ray_errors` does."""
    with naming_ray_errors(name, timeout_s):
        async with asyncio.timeout(timeout_s):
            return await reference


def _log_lines(descriptor: int) -> list[str]:
    """Return the lines of the file behind an output of this process; an empty list when it is not a file."""
    path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    # Ray writes marks for its own log reader between the lines: ":job_id:...", ":actor_name:...".
    return [line.strip() for line in lines if line.strip() and not line.startswith(":")]
