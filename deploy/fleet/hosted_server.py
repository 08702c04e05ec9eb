"""A rollout server's class as the fleet starts it: the class itself, and where its process is and logs."""

import gc
import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

import ray

from deploy.fleet.place import assigned_here, this_node
from protocol.errors import OperatorError
from protocol.node.home import read_cluster

_TAIL_LINES = 12


class Hosted:
    """What the fleet asks of a server beside the server's own methods."""

    async def start(self, files: Mapping[str, bytes] | None = None) -> dict[str, object]:
        """Start as the server's class does; what is in memory then is never searched for garbage again.

        A search that finds nothing among vLLM's and torch's objects holds all event loops up for a tenth of a second
        and more.
        """
        described: dict[str, object] = await super().start(files)  # type: ignore[misc]
        if not gc.get_freeze_count():
            gc.collect()
            gc.freeze()
        return described

    async def describe(self) -> dict[str, object]:
        """Return the description by the server's class, with the address and Ray's name of its node."""
        described: dict[str, object] = await super().describe()  # type: ignore[misc]
        return {**described, "node_ip": ray.util.get_node_ip_address(), "node_id": this_node()}

    async def where(self) -> dict[str, object]:
        """Return the node of this server, what it takes of it, its process and log, and where its node's retriever is
        searched by others (None: it is not).
        """
        where = {"node_ip": ray.util.get_node_ip_address(), "pid": os.getpid(), "log": _own_log()}
        where |= {"node_id": this_node(), "assigned": assigned_here()}
        try:
            return {**where, "shared_retriever_url": read_cluster().shared_retriever_url}
        except OperatorError:  # the cluster is being stopped
            return {**where, "shared_retriever_url": None}

    async def log_tail(self) -> str:
        """Return the last lines that this process and its engine wrote, to standard output and to standard error."""
        return " | ".join(line for descriptor in (1, 2) for line in _last_lines(descriptor))


def hosted(server_class: str) -> type:
    """Return the class named `module:Class` with the methods of Hosted."""
    module, _, name = server_class.partition(":")
    return type(name, (Hosted, getattr(import_module(module), name)), {})


def _own_log() -> str:
    """Ray sends an actor's errors, and those of the processes it starts, to a file of its own."""
    return os.readlink("/proc/self/fd/2")


def _last_lines(descriptor: int) -> list[str]:
    """Return the last lines of the file behind an output of this process; none when there is no such file."""
    path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    # Ray writes marks for its own log reader between the lines: ":job_id:...", ":actor_name:...".
    return [line.strip() for line in lines if line.strip() and not line.startswith(":")][-_TAIL_LINES:]
