"""What `deploy/start_cluster.sh` can be told, and what it remembers of earlier starts."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.cluster.join_file import read_join_file
from deploy.cluster.options.node_address import address_toward, is_address, read_head_address, read_node_address
from deploy.cluster.options.own_resources import read_resources
from deploy.cluster.options.port_range import PortRange, read_port_range
from protocol.addresses import with_port
from protocol.errors import SettingsError

LOOPBACK = "127.0.0.1"


# Longer than any start, and short enough for every timer.
_LONGEST_S = 1e6
# What is not given, and was not given before, is this.
_DEFAULTS: dict[str, Any] = {
    "address": None,
    "node_ip": None,
    "ray_port": 6379,
    "retriever_port": 8000,
    "reward_port": 8001,
    "ports": None,
    "retriever_script": None,
    "open_retriever": False,
    "corpus_path": None,
    "index_path": None,
    "topk": 3,
    "reward_scorer": "exact_match",
    "no_reward": False,
    "start_timeout_s": 300.0,
    "dashboard_port": None,
    "dashboard_host": None,
    "num_cpus": None,
    "num_gpus": None,
    "resources": None,
    "wait_nodes": 0,
    "block": False,
    "join": None,
}
# Options of one start alone: another start does not take them over.
_OF_ONE_START = ("start_timeout_s", "wait_nodes", "block", "join")

# How the text of an option is read.
_READ: dict[str, Callable[[str], Any]] = {
    "address": read_head_address,
    "node_ip": read_node_address,
    "ports": read_port_range,
    "resources": read_resources,
    **{name: lambda path: Path(path).resolve() for name in ("retriever_script", "corpus_path", "index_path", "join")},
}


@dataclass(frozen=True)
class StartOptions:
    """One node's part of a cluster."""

    head: str | None  # HOST:PORT of the Ray head to join; None makes this node the head
    node_ip: str  # this node's address for the others; 127.0.0.1: nobody else gets in
    ray_port: int  # of the Ray head, where this node is it
    retriever_port: int  # on 127.0.0.1
    reward_port: int  # of the bundled reward server, on 127.0.0.1
    ports: PortRange | None  # of all else that other nodes have to reach; None: the system chooses
    retriever_script: Path | None  # the user's own, in place of launch_retriever.sh
    open_retriever: bool  # the retriever asks for no token
    corpus_path: Path | None  # None: the quick start's
    index_path: Path | None  # None: made in SLUICE_HOME
    topk: int  # passages of a search that names no number
    reward_scorer: str | None  # None: no reward server
    start_timeout_s: float  # longest wait for each service to be healthy, and for the nodes that are waited for
    dashboard_port: int | None  # of Ray's dashboard and job server, on the head; None: neither runs
    dashboard_host: str | None  # address that both listen on; None: 127.0.0.1
    num_cpus: int | None  # that Ray counts on this node; None: those there are
    num_gpus: int | None  # the same for GPUs
    resources: str | None  # this node's own names for what it has, a JSON object of numbers
    wait_nodes: int  # the start ends when the cluster has so many nodes, this one counted; 0: at once
    block: bool  # the start stays in the foreground until it is told to end
    join: Path | None  # the head's join file

    @property
    def ray_address(self) -> str:
        """HOST:PORT of the Ray head."""
        return self.head or with_port(self.node_ip, self.ray_port)

    def to_remember(self) -> dict[str, bool | str | int | None]:
        """Return what the next start of this cluster takes for options that it is not given."""
        kept = {name: getattr(self, name) for name in _DEFAULTS if name in self.__dataclass_fields__}
        kept |= {"address": self.head, "no_reward": self.reward_scorer is None}
        for name in _OF_ONE_START:
            del kept[name]
        if self.reward_scorer is None:
            del kept["reward_scorer"]
        return {name: str(value) if isinstance(value, Path | PortRange) else value for name, value in kept.items()}


def read_start_options(arguments: Sequence[str], remembered: Mapping[str, Any] | None = None) -> StartOptions:
    """Return the options of a start: those given, else those that the running cluster remembers, else the defaults.

    Exits 2 on an unknown flag. Raises: SettingsError for a value that cannot be.
    """
    given = vars(_parser().parse_args(arguments))
    if given.pop("defaults"):
        remembered = None
    options = _DEFAULTS | _still_meant(remembered or {}, given) | given
    if "join" in given and "address" in given:
        raise SettingsError("start_cluster: give --join or --address: the join file names the head's address.")
    options |= {name: read(options[name]) for name, read in _READ.items() if options[name] is not None}
    _check(options, is_joining="join" in given or options["address"] is not None)
    if "join" in given:
        options["address"] = read_join_file(options["join"]).ray_address
    head = options.pop("address")
    node_ip = options["node_ip"] or (LOOPBACK if head is None else address_toward(head))
    if options.pop("no_reward"):
        options["reward_scorer"] = None
    return StartOptions(**{**options, "head": head, "node_ip": node_ip})


def _still_meant(remembered: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is remembered and not overruled by what is given, of the options that this code knows."""
    overruled = set(_OF_ONE_START)
    for option, goes_with_it in (
        ("corpus_path", "index_path"),  # an index belongs to the corpus it was built from
        ("reward_scorer", "no_reward"),
        ("address", "node_ip"),  # the address by which others see this node depends on who they are
        ("join", "node_ip"),
        *((way, f"dashboard_{part}") for way in ("address", "join") for part in ("port", "host")),  # the head's
    ):
        if option in given:
            overruled.add(goes_with_it)
    return {name: value for name, value in remembered.items() if name in _DEFAULTS and name not in overruled}


def _check(options: Mapping[str, Any], is_joining: bool) -> None:
    """Raise SettingsError for the first value that cannot be."""
    if options["index_path"] is not None and options["corpus_path"] is None:
        raise SettingsError("start_cluster: --index-path needs the --corpus-path that the index was built from.")
    for path in (options["corpus_path"], options["retriever_script"]):
        if path is not None and not path.is_file():
            raise SettingsError(
                f"start_cluster: {path} is not a file. Give the path of one; --defaults forgets what was given earlier."
            )
    if options["reward_scorer"] != _DEFAULTS["reward_scorer"]:
        _check_scorer(options["reward_scorer"])
    if not 0 < options["start_timeout_s"] <= _LONGEST_S:
        raise SettingsError(
            f"start_cluster: --start-timeout-s {options['start_timeout_s']:g} is no time to wait. Give seconds "
            f"above 0, {_LONGEST_S:g} at most."
        )
    for flag, least in (("num_cpus", 0), ("num_gpus", 0), ("wait_nodes", 0), ("topk", 1)):
        if options[flag] is not None and options[flag] < least:
            raise SettingsError(f"start_cluster: --{flag.replace('_', '-')} {options[flag]} is below {least}.")
    own = ("retriever", "reward") if is_joining else ("ray", "retriever", "reward")
    ports = {f"--{name}-port": options[f"{name}_port"] for name in own}
    if options["dashboard_port"] is not None and is_joining:
        raise SettingsError("start_cluster: --dashboard-port is the head's: this node joins one. Remove it.")
    if options["dashboard_host"] is not None and options["dashboard_port"] is None:
        raise SettingsError("start_cluster: --dashboard-host needs --dashboard-port: else no dashboard runs.")
    if options["dashboard_host"] is not None and not is_address(options["dashboard_host"]):
        raise SettingsError(
            f"start_cluster: --dashboard-host {options['dashboard_host']} is no IP address. Give one of this node's, "
            "or 0.0.0.0 for all of them."
        )
    if options["dashboard_port"] is not None:
        ports["--dashboard-port"] = options["dashboard_port"]
    for flag, port in ports.items():
        if not 1 <= port <= 65535:
            raise SettingsError(f"start_cluster: {flag} {port} is no port. Use 1 to 65535.")
    for flag, port in ports.items():
        if options["ports"] is not None and port in options["ports"]:
            raise SettingsError(
                f"start_cluster: {flag} {port} is one of --ports {options['ports']}. Use one outside of them."
            )
    if len(set(ports.values())) < len(ports):
        listed = ", ".join(f"{flag} {port}" for flag, port in ports.items())
        raise SettingsError(f"start_cluster: two services cannot share a port ({listed}). Give each its own.")


def _check_scorer(name: str) -> None:
    """Raise SettingsError for a scorer with which the bundled reward server would end at its start."""
    from rewards.bundled import SCORERS  # half a second, for those who name one

    if name == "reward_model":
        raise SettingsError(
            "start_cluster: --reward-scorer reward_model needs a model, which is no option of a cluster's start. Give "
            "--no-reward, and start python -m rewards.serve --scorer reward_model --model MODEL beside it."
        )
    if name not in SCORERS:
        raise SettingsError(
            f"start_cluster: --reward-scorer {name} is not known. Use one of "
            f"{', '.join(sorted(set(SCORERS) - {'reward_model'}))}, or --no-reward and a reward server of your own."
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="deploy/start_cluster.sh",
        description="Start this node's part of a cluster, or what is missing of it. "
        "On a cluster that runs, an option that is not given stays as it was given before.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--address", metavar="HEAD:6379", help="join the cluster whose Ray head is there; without it this is the head")
    add("--join", type=Path, metavar="FILE", help="join the cluster whose head wrote this file")
    add("--node-ip", metavar="IP", help="this node's address for the others (head: 127.0.0.1, so nobody else gets in)")
    add("--ray-port", "--port", type=int, help="port of the Ray head (default: 6379)")
    add("--retriever-port", type=int, help="port of this node's retriever (default: 8000)")
    add("--reward-port", type=int, help="port of the bundled reward server (default: 8001)")
    add("--ports", metavar="FIRST-LAST", help="what else other nodes must reach listens here (default: any port)")
    add(
        "--retriever-script",
        type=Path,
        metavar="FILE",
        help="your own retriever; gets the arguments of launch_retriever.sh",
    )
    add("--open-retriever", action="store_true", help="the retriever asks programs of this machine for no token")
    add("--corpus-path", type=Path, metavar="JSONL", help='documents {"id", "contents"}; default: the quick start\'s')
    add("--index-path", type=Path, metavar="DIR", help="index of the corpus; default: made in SLUICE_HOME")
    add("--topk", type=int, help="passages when a request names no topk (default: 3)")
    reward = parser.add_mutually_exclusive_group()
    reward.add_argument("--reward-scorer", help="scorer of the bundled reward server (default: exact_match)")
    reward.add_argument("--no-reward", action="store_true", help="start no reward server: settings name your own")
    add("--dashboard-port", type=int, metavar="8265", help="run Ray's dashboard and job server there (head alone)")
    add("--dashboard-host", metavar="IP", help="where the dashboard listens, behind Ray's token (default: 127.0.0.1)")
    add("--num-cpus", type=int, help="CPUs that Ray counts on this node (default: those there are)")
    add("--num-gpus", type=int, help="GPUs that Ray counts on this node (default: those there are)")
    add("--resources", metavar="JSON", help="names of your own for what this node has, such as '{\"v100\": 8}'")
    add("--start-timeout-s", type=float, help="longest wait for each service to become healthy (default: 300)")
    add("--wait-nodes", type=int, metavar="N", help="end when the cluster has N nodes, this one counted")
    add("--block", action="store_true", help="stay in the foreground; SIGTERM or Ctrl-C stops this node's part")
    add("--defaults", action="store_true", default=False, help="forget what earlier starts of this cluster were given")
    return parser
