"""Where a node's cluster keeps its files, and what is known of the cluster that runs here.

SLUICE_HOME (default: .sluice beside the code) holds cluster.json, keys/, token, ray_token, logs/, cache/, quickstart/.
Folders are 0700 and secrets 0600.
"""

import os
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from protocol.disk.files import replace_file
from protocol.errors import OperatorError
from protocol.node.process_space import process_space, started_ticks
from protocol.wire.channel import KeyPair

_NO_CLUSTER = "No Sluice cluster runs here. Start one with deploy/start_cluster.sh"


class ProcessRecord(BaseModel):
    """A process of ours: pid and start together say that it is still the same one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str  # what it is: ray, retriever or reward
    pid: int  # of the process; Ray's: its raylet
    started_at: float  # Unix seconds, by what the clock was set to when it was recorded
    ticks: int | None = None  # of the kernel, from its own start to the process's; None: an earlier version's record
    processes: str = ""  # of which machine and container `pid` is a number (`process_space`)
    url: str | None  # where it is asked: an http address; Ray's: HOST:PORT. None: nowhere
    log: str  # path of its log; Ray's: the folder of its logs
    # what it was started with; a start that asks for another command replaces it. Ray's: what it was told of resources
    command: tuple[str, ...] = ()
    code: str = ""  # digest of the code it runs; a start with other code replaces it. Empty: none of ours

    def is_still(self, started_at: float, tolerance_s: float) -> bool:
        """Return whether the process that has this pid now, and began at `started_at` by today's clock, is this one."""
        if self.ticks is None:
            return abs(started_at - self.started_at) < tolerance_s
        return self.processes == process_space() and self.ticks == started_ticks(self.pid)


class ClusterState(BaseModel):
    """cluster.json: addresses and files, never a secret itself."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ray_address: str  # HOST:PORT for ray.init
    namespace: str  # Ray namespace of our actors
    node_ip: str  # this node's, by which other processes reach it; 127.0.0.1: this machine alone
    retriever_url: str  # where searches are posted, /retrieve included
    shared_retriever_url: str | None = None  # the same for other nodes, while their own is down; None: they do not
    reward_url: str | None  # where samples are posted to the bundled reward service; None: started without it
    token_file: str  # path of the bearer token of retriever and reward service
    ray_token_file: str  # path of Ray's own token
    keys_dir: str  # folder of the CURVE keys
    processes: list[ProcessRecord]  # on this node: ray, retriever and, unless it was declined, reward
    # of the start that made it: the next start's, where it is given no other
    options: dict[str, bool | str | int | None] = {}

    def ray_environment(self) -> dict[str, str]:
        """Return the environment variables a process needs before it imports ray, to be let in."""
        environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": self.ray_token_file}
        if self.node_ip == "127.0.0.1":
            # Otherwise Ray looks for 127.0.0.1 at its address on the network, where nothing of ours listens.
            environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        return environment


class Keys(NamedTuple):
    """CURVE keys of a run's sockets."""

    coordinator: KeyPair  # the coordinator's own: every peer knows its public half
    peer: KeyPair  # that of every rank and rollout server: the only ones let in


def sluice_home() -> Path:
    """Return the folder of this node's cluster."""
    return Path(os.environ.get("SLUICE_HOME") or Path(__file__).resolve().parents[2] / ".sluice")


def cluster_path() -> Path:
    return sluice_home() / "cluster.json"


def read_cluster() -> ClusterState:
    """Return what is known of the cluster that runs here. Raises: OperatorError when there is none."""
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
    """Write a file that only its owner can read, in one step."""
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
