"""What `deploy/start_cluster.sh` can be told; parsed by `deploy.cluster`."""

import argparse
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import OperatorError, SettingsError

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class StartOptions:
    """One node's part of a cluster. head: HOST:PORT of the Ray head to join; None makes this node the head."""

    head: str | None
    node_ip: str
    ray_port: int
    retriever_port: int
    reward_port: int
    retriever_script: Path | None
    corpus_path: Path | None
    index_path: Path | None
    topk: int
    reward_scorer: str | None
    start_timeout_s: float


def read_start_options(arguments: Sequence[str]) -> StartOptions:
    """Return the options of a start. Exits 2 on an unknown flag. Raises: SettingsError for a value that cannot be."""
    given = _parser().parse_args(arguments)
    if given.index_path is not None and given.corpus_path is None:
        raise SettingsError("start_cluster: --index-path needs the --corpus-path that the index was built from.")
    for path in (given.corpus_path, given.retriever_script):
        if path is not None and not path.is_file():
            raise SettingsError(f"start_cluster: {path} is not a file. Give the path of one.")
    ports = {"--ray-port": given.ray_port, "--retriever-port": given.retriever_port, "--reward-port": given.reward_port}
    for flag, port in ports.items():
        if not 1 <= port <= 65535:
            raise SettingsError(f"start_cluster: {flag} {port} is no port. Use 1 to 65535.")
    if len(set(ports.values())) < len(ports):
        listed = ", ".join(f"{flag} {port}" for flag, port in ports.items())
        raise SettingsError(f"start_cluster: two services cannot share a port ({listed}). Give each its own.")
    return StartOptions(
        head=given.address,
        node_ip=given.node_ip or (LOOPBACK if given.address is None else _address_toward(given.address)),
        ray_port=given.ray_port,
        retriever_port=given.retriever_port,
        reward_port=given.reward_port,
        retriever_script=given.retriever_script and given.retriever_script.resolve(),
        corpus_path=given.corpus_path and given.corpus_path.resolve(),
        index_path=given.index_path and given.index_path.resolve(),
        topk=given.topk,
        reward_scorer=None if given.no_reward else given.reward_scorer,
        start_timeout_s=given.start_timeout_s,
    )


def _address_toward(head: str) -> str:
    """Return the address of this node that a peer at `head` sees; sends nothing."""
    host, _, port = head.rpartition(":")
    if not host or not port.isdigit():
        raise SettingsError(
            f"start_cluster: --address {head} is not HOST:PORT. Give the head's, such as 10.0.0.1:6379."
        )
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, int(port)))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise OperatorError(f"start_cluster: --address {head}: {error}. Give an address this node can reach.") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="deploy/start_cluster.sh", description="Start this node's part of a cluster.")
    add = parser.add_argument
    add("--address", metavar="HEAD:6379", help="join the cluster whose Ray head is there; without it this is the head")
    add("--node-ip", metavar="IP", help="this node's address for the others (head: 127.0.0.1, so nobody else gets in)")
    add("--ray-port", "--port", type=int, default=6379, help="port of the Ray head")
    add("--retriever-port", type=int, default=8000, help="port of this node's retriever")
    add("--reward-port", type=int, default=8001, help="port of the bundled reward server")
    add(
        "--retriever-script",
        type=Path,
        metavar="FILE",
        help="your own retriever; gets the arguments of launch_retriever.sh",
    )
    add("--corpus-path", type=Path, metavar="JSONL", help='documents {"id", "contents"}; default: the quick start\'s')
    add("--index-path", type=Path, metavar="DIR", help="index of the corpus; default: made in SLUICE_HOME")
    add("--topk", type=int, default=3, help="passages when a request names no topk")
    reward = parser.add_mutually_exclusive_group()
    reward.add_argument("--reward-scorer", default="exact_match", help="scorer of the bundled reward server")
    reward.add_argument("--no-reward", action="store_true", help="start no reward server: settings name your own")
    add("--start-timeout-s", type=float, default=300.0, help="longest wait for each service to become healthy")
    return parser
