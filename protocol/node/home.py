"""The files of a node's cluster, and the description of the cluster that runs here.

SLUICE_HOME (default: .sluice in the checkout) holds cluster.json, keys/, token, ray_token, logs/, cache/, quickstart/.
Folders are 0700 and secrets 0600.
"""

import os
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from protocol.disk.files import replace_file
from protocol.errors import OperatorError
from protocol.node.identity import process_space, started_ticks
from protocol.wire.channel import KeyPair

_NO_CLUSTER = "No Sluice cluster runs here. Start one with deploy/start_cluster.sh"


class ProcessRecord(BaseModel):
    """A process of ours, identified by its pid and its start."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str  # ray, retriever or reward
    pid: int  # process number; for ray the raylet's
    started_at: float  # Unix seconds, by the clock at the time of the record
    ticks: int | None = None  # start of the process in kernel ticks; None: an earlier version's record
    processes: str = ""  # machine and container in which `pid` is unique (`process_space`)
    url: str | None  # http address; for ray HOST:PORT. None: no address
    log: str  # path of its log; for ray the folder of its logs
    # command line, without which a start replaces the process; for ray its resources
    command: tuple[str, ...] = ()
    code: str = ""  # digest of its code; a start with other code replaces it. Empty: not our code

    def is_still(self, started_at: float, tolerance_s: float) -> bool:
        """Return whether this is the process that has the pid now and started at `started_at` by the present clock."""
        if self.ticks is None:
            return abs(started_at - self.started_at) < tolerance_s
        return self.processes == process_space() and self.ticks == started_ticks(self.pid)


class ClusterState(BaseModel):
    """cluster.json: addresses and files, no secret."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ray_address: str  # HOST:PORT for ray.init
    namespace: str  # Ray namespace of our actors
    node_ip: str  # address of this node for other processes; 127.0.0.1: only this machine
    retriever_url: str  # address for searches, with /retrieve
    shared_retriever_url: str | None = None  # address for other nodes while their retriever is down; None: not shared
    reward_url: str | None  # address of the bundled reward service; None: it was not started
    token_file: str  # path of the bearer token of retriever and reward service
    ray_token_file: str  # path of Ray's own token
    keys_dir: str  # folder of the CURVE keys
    processes: list[ProcessRecord]  # processes on this node: ray, retriever and reward
    # options of the start, which are the defaults of the next start
    options: dict[str, bool | str | int | None] = {}

    def ray_environment(self) -> dict[str, str]:
        """Return the environment variables that a process needs to connect, before it imports ray."""
        environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": self.ray_token_file}
        if self.node_ip == "127.0.0.1":
            # Otherwise Ray replaces 127.0.0.1 by the network address, where we do not listen.
            environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        return environment


class Keys(NamedTuple):
    """CURVE keys of a run's sockets."""

    coordinator: KeyPair  # pair of the coordinator; peers know its public key
    peer: KeyPair  # pair of all ranks and rollout servers, which the coordinator accepts


def sluice_home() -> Path:
    """Return the folder of this node's cluster."""
    return Path(os.environ.get("SLUICE_HOME") or Path(__file__).resolve().parents[2] / ".sluice")


def cluster_path() -> Path:
    return sluice_home() / "cluster.json"


def read_cluster() -> ClusterState:
    """Return the description of the cluster that runs here. Raises: OperatorError when there is none."""
    try:
        return ClusterState.model_validate_json(cluster_path().read_bytes())
    except FileNotFoundError:
        raise OperatorError(f"{_NO_CLUSTER}.") from None
    except (OSError, ValidationError) as error:
        raise OperatorError(f"{cluster_path()} cannot be used ({type(error).__name__}). {_NO_CLUSTER}.") from None


def write_cluster(state: ClusterState) -> None:
    """Replace cluster.json in one step."""
    write_secret(cluster_path(), state.model_dump_json(indent=1))


def load_keys() -> Keys:
    """Return the CURVE keys of this cluster. Raises: OperatorError when they are missing or others may read them."""
    return Keys(_load_pair("coordinator"), _load_pair("peer"))


def write_secret(path: Path, text: str) -> None:
    """Replace a file that only its owner can read, in one step."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    replace_file(path, text.encode(), mode=0o600)


def _load_pair(name: str) -> KeyPair:
    folder = sluice_home() / "keys"
    secret = folder / f"{name}.sec"
    try:
        if secret.stat().st_mode & 0o077:
            raise OperatorError(f"{secret} can be read by others. Run: chmod 600 {secret}")
        return KeyPair((folder / f"{name}.pub").read_bytes().strip(), secret.read_bytes().strip())
    except OSError as error:
        raise OperatorError(f"{error.filename} cannot be read: {error.strerror}. {_NO_CLUSTER}.") from None
