"""A head whose raylet has died while Ray's GCS, its account of the cluster, goes on: the raylet alone is begun again.

Ray ends a raylet with either of its agents. The other nodes, and the rollout servers there, notice nothing of it: only
what ran on the head is lost. Ray itself begins a head's raylet with a new GCS only, which would end all nodes; so the
raylet's own command is remembered here and given again, with another name for the node.
"""

import json
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from deploy.cluster.known import connect_environment, does_head_answer, is_head, known_processes
from deploy.cluster.node_ray.processes import environment_of_ray, first_named, ray_processes, told_to_ray
from deploy.cluster.options.start_options import StartOptions
from deploy.node.home import Home
from deploy.node.processes import end, family, find, last_lines, launch
from protocol.errors import OperatorError
from protocol.node.home import ClusterState, ProcessRecord, read_cluster, write_secret
from protocol.node.process_space import started_ticks
from protocol.ray_calls import first_line

GCS = "gcs"
"""The name under which a start counts it among what stays."""

# What a head runs beside its raylet, by a part of each one's command.
_OF_HEAD = ("/gcs/gcs_server", "/dashboard/dashboard.py", "/autoscaler/_private/monitor.py", "ray.util.client.server")
_NODE_ID, _SOCKETS = "--node_id=", ("--raylet_socket_name=", "--store_socket_name=")
_ID_BYTES = 28
# Its workers have nothing to save, and end without their raylet by themselves.
_TERM_S = 2.0
_POLL_S = 0.1
_ALIVE = 0  # Ray's number for it


class GcsOfNoUse(OperatorError):
    """The GCS that outlived its raylet takes no other, or Ray does not come back with it."""


def remember_raylet(raylet: ProcessRecord, home: Home) -> None:
    """Keep the command of a head's raylet, which has no secret in it, for as long as its GCS runs."""
    _remember(psutil.Process(raylet.pid).cmdline(), home)


def find_gcs(state: ClusterState, home: Home) -> ProcessRecord | None:
    """Return the GCS of this node that goes on without its raylet; None where there is none, or the raylet runs."""
    raylet = next((record for record in state.processes if record.name == "ray"), None)
    if not is_head(state) or raylet is None or find(raylet) is not None or not _command_file(home).is_file():
        return None
    gcs = first_named("gcs_server", ray_processes(home))  # while workers end: their raylet is gone
    if gcs is None or not does_head_answer(state):
        return None
    started = {"pid": gcs.pid, "started_at": gcs.create_time(), "ticks": started_ticks(gcs.pid)}
    return raylet.model_copy(update={"name": GCS, **started})


def end_what_raylet_ran(home: Home) -> None:
    """End this node's raylet and what it left behind: the head's own processes and the services stay."""
    known = [record for record in known_processes().values() if record.name != "ray"]
    services = [found for record in known if (found := find(record)) is not None]
    kept = {process.pid for process in family(services)}
    left = [each for each in ray_processes(home) if each.pid not in kept and not _is_of_head(each)]
    end(left, term_s=_TERM_S)


def launch_raylet(options: StartOptions, home: Home) -> ProcessRecord:
    """Begin the head's raylet again; returns its record. `await_raylet` waits until the cluster knows it.

    Raises: GcsOfNoUse when its command is not known.
    """
    command = _remembered(home)
    old = next(part for part in command if part.startswith(_NODE_ID)).removeprefix(_NODE_ID)
    new = secrets.token_hex(_ID_BYTES)  # Ray takes no node back that it has given up
    for part in command:
        for name in _SOCKETS:
            if part.startswith(name):
                Path(part.removeprefix(name)).unlink(missing_ok=True)
    command = [part.replace(old, new) for part in command]
    log = home.logs / "ray_start.log"
    started = launch("ray", command, "", log, environment_of_ray(options, home), options.ray_address, Path.cwd())
    _remember(command, home)
    logs = str((home.ray_folder / "r" / "session_latest" / "logs").resolve())
    return started.model_copy(update={"command": told_to_ray(options), "log": logs})


def await_raylet(raylet: ProcessRecord, home: Home, timeout_s: float) -> None:
    """Return once the cluster has this raylet, and no earlier one, for its head. Raises: GcsOfNoUse when it has not.

    A driver that came earlier would be sent to the node that is no more.
    """
    connect_environment(read_cluster())
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.exceptions import RpcError

    command = _remembered(home)
    deadline = time.monotonic() + timeout_s
    try:
        client = GcsClient(address=raylet.url)
        while time.monotonic() < deadline and find(raylet) is not None:
            nodes = client.get_all_node_info(timeout=timeout_s)
            heads = [node.hex() for node, info in nodes.items() if info.is_head_node and info.state == _ALIVE]
            if len(heads) == 1 and f"{_NODE_ID}{heads[0]}" in command:
                return
            time.sleep(_POLL_S)
    except RpcError as error:  # its process is there, and stands still
        raise GcsOfNoUse(f"Ray's GCS on the head does not answer: {first_line(error).rstrip('.')}") from None
    raise GcsOfNoUse(
        f"Ray's process on the head could not be begun again: {last_lines(home.logs / 'ray_start.log')} "
        f"(logs: {raylet.log})"
    )


def _is_of_head(process: psutil.Process) -> bool:
    try:
        title = " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False
    return any(part in title for part in _OF_HEAD)


def _remember(command: Sequence[str], home: Home) -> None:
    write_secret(_command_file(home), json.dumps(command))


def _remembered(home: Home) -> list[str]:
    """Return the raylet's command. Raises: GcsOfNoUse when the file is none that was written here."""
    path = _command_file(home)
    try:
        command = json.loads(path.read_text(encoding="utf-8"))
        if [part for part in command if part.startswith(_NODE_ID)]:
            return list(command)
    except (OSError, ValueError, TypeError, AttributeError):  # cut off by a full disk, or written by another hand
        pass
    raise GcsOfNoUse(f"Ray's process on the head could not be begun again: {path} holds no command of it")


def _command_file(home: Home) -> Path:
    return home.ray_folder / "raylet.json"
