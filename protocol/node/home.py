"""The files and the description of a node's cluster.

SLUICE_HOME holds cluster.json, keys/, token, ray_token, logs/, cache/, quickstart/. Its default is .sluice in the
checkout, or in the home folder of an installed Sluice's user.
Folders are 0700 and secrets 0600.
"""

import os
import shlex
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from protocol.disk.files import replace_file
from protocol.errors import OperatorError
from protocol.node.identity import process_space, started_ticks
from protocol.wire.channel import KeyPair


class ProcessRecord(BaseModel):
    """A process of ours."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str  # ray, retriever or reward
    pid: int  # for ray the raylet's
    started_at: float  # Unix seconds, by the clock of that time
    ticks: int | None = None  # start in kernel ticks; None: an older record
    processes: str = ""  # machine and container of the pid
    url: str | None  # http address; for ray HOST:PORT
    log: str  # path of its log; for ray a folder
    command: tuple[str, ...] = ()  # command line; for ray its resources. A start with another replaces the process
    code: str = ""  # digest of its code, likewise. Empty: not our code

    def is_still(self, started_at: float, tolerance_s: float) -> bool:
        """Return whether this process still has its pid. started_at: the pid's start by the present clock."""
        if self.ticks is None:
            return abs(started_at - self.started_at) < tolerance_s
        return self.processes == process_space() and self.ticks == started_ticks(self.pid)


class ClusterState(BaseModel):
    """cluster.json: addresses and files, no secret."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ray_address: str  # HOST:PORT for ray.init
    namespace: str  # Ray namespace of our actors
    node_ip: str  # address of this node; 127.0.0.1: only this machine
    retriever_url: str  # with /retrieve
    shared_retriever_url: str | None = None  # address for nodes whose retriever is down; None: not shared
    reward_url: str | None  # address of the bundled reward service; None: not started
    token_file: str  # of the services
    ray_token_file: str
    keys_dir: str
    processes: list[ProcessRecord]
    # options of the start, the defaults of the next
    options: dict[str, bool | str | int | None] = {}

    def ray_environment(self) -> dict[str, str]:
        """Return the environment variables that a process needs before it imports ray."""
        environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": self.ray_token_file}
        if self.node_ip == "127.0.0.1":
            # Otherwise Ray uses the network address, where we do not listen.
            environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        return environment


class Keys(NamedTuple):
    """CURVE keys of a run's sockets."""

    coordinator: KeyPair
    peer: KeyPair  # pair of all ranks and rollout servers


def sluice_home() -> Path:
    """Return the folder of this node's cluster."""
    if given := os.environ.get("SLUICE_HOME"):
        return Path(given)
    root = Path(__file__).resolve().parents[2]
    return (root if (root / "pyproject.toml").is_file() else Path.home()) / ".sluice"


def cluster_path() -> Path:
    return sluice_home() / "cluster.json"


def read_cluster() -> ClusterState:
    """Return the description of the node's cluster. Raises: OperatorError when there is none."""
    try:
        return ClusterState.model_validate_json(cluster_path().read_bytes())
    except FileNotFoundError:
        raise OperatorError(_no_cluster()) from None
    except (OSError, ValidationError) as error:
        raise OperatorError(f"{cluster_path()} cannot be used ({type(error).__name__}). {_no_cluster()}") from None


def write_cluster(state: ClusterState) -> None:
    """Replace cluster.json in one step."""
    write_secret(cluster_path(), state.model_dump_json(indent=1))


def load_keys() -> Keys:
    """Return the cluster's keys. Raises: OperatorError when they are missing or others may read them."""
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
            raise OperatorError(f"{secret} can be read by others. Run: chmod 600 {shlex.quote(str(secret))}")
        return KeyPair((folder / f"{name}.pub").read_bytes().strip(), secret.read_bytes().strip())
    except OSError as error:
        raise OperatorError(f"{error.filename} cannot be read: {error.strerror}. {_no_cluster()}") from None


def _no_cluster() -> str:
    """Return the error and its cures: another shell may lack SLUICE_HOME."""
    how = "from SLUICE_HOME" if os.environ.get("SLUICE_HOME") else "the default, because SLUICE_HOME is not set"
    return (
        f"No Sluice cluster runs in {sluice_home()} ({how}). Start one with sluice start, or set "
        "SLUICE_HOME to the folder of a running one."
    )
