"""Options of `sluice start`, and the options that a start remembers of earlier starts."""

import argparse
import ipaddress
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

from deploy.cluster.joining import read_join_file
from protocol.addresses import host_and_port, own_address_toward, with_port
from protocol.errors import OperatorError, SettingsError
from protocol.settings.placement import MOST_OF_A_RESOURCE, is_name_of_ray

LOOPBACK = "127.0.0.1"
# Longer than any start, and short enough for every timer.
_MAX_WAIT_S = 1e6
_DENSE, _FAISS = ("e5", "bge", "dense"), ("flat", "hnsw", "ivf")
_ONE_START_ONLY = ("start_timeout_s", "wait_nodes", "block", "join")  # options that are not remembered
_ALIASES = {"ray_port": ("--port",)}
_WHERE_TO_LOOK = "Give this node's, on the network that the nodes share; `ip -brief address` lists them."

# A port range is divided: ten ports for Ray's processes and the services, half of the rest for Ray's workers, the other
# half for our processes.
_RAY_PROCESSES = (
    "node-manager",
    "object-manager",
    "dashboard-agent-listen",
    "dashboard-agent-grpc",
    "runtime-env-agent",
    "metrics-export",
)
_SERVICES = ("ray_port", "retriever_port", "reward_port")  # options whose ports follow those of Ray's processes
_NUM_RAY_PORTS = 10
_MIN_PORTS = 200  # Ray starts a worker, with a port of its own, for each CPU and each actor
_LOWEST_PORT = 1024


@dataclass(frozen=True)
class PortRange:
    """The ports first..last.

    Example: 20000-20999 gives Ray's processes and the services 20000-20009, Ray's workers 20010-20504, us 20505-20999.
    """

    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"

    def __contains__(self, port: int) -> bool:
        return self.first <= port <= self.last

    @property
    def ray_flags(self) -> dict[str, int]:
        """Flags of `ray start` for its processes and workers on each node."""
        workers = {"--min-worker-port": self.first + _NUM_RAY_PORTS, "--max-worker-port": self._first_of_ours - 1}
        return {**{f"--{name}-port": self.first + place for place, name in enumerate(_RAY_PROCESSES)}, **workers}

    @property
    def service_ports(self) -> dict[str, int]:
        """Ports of the Ray head, the retriever and the reward server, by option, where these are not given."""
        return {option: self.first + len(_RAY_PROCESSES) + place for place, option in enumerate(_SERVICES)}

    @property
    def ray_client_port(self) -> int:
        """Port of Ray's proxy for remote drivers, on the head."""
        return self.first + _NUM_RAY_PORTS - 1

    @property
    def ours(self) -> str:
        """FIRST-LAST for our own processes: coordinator, rank 0, the groups of weight pushes."""
        return f"{self._first_of_ours}-{self.last}"

    @property
    def _first_of_ours(self) -> int:
        return (self.first + _NUM_RAY_PORTS + self.last + 1) // 2


@dataclass(frozen=True)
class StartOptions:
    """One node's part of a cluster. Each field is a flag of start_cluster.sh: type, help and the value's name."""

    address: Annotated[str | None, "join this Ray head; without it this node is the head", "HEAD:6379"] = None
    join: Annotated[Path | None, "join the cluster whose head wrote this file", "FILE"] = None
    node_ip: Annotated[str, "this node's address for the others (head: 127.0.0.1, closed to others)", "IP"] = LOOPBACK
    ray_port: Annotated[int, "port of the Ray head (default: 6379, or of --ports)"] = 6379
    retriever_port: Annotated[int, "port of this node's retriever (default: 8000, or of --ports)"] = 8000
    reward_port: Annotated[int, "port of the bundled reward server (default: 8001, or of --ports)"] = 8001
    ports: Annotated[PortRange | None, "range that holds all ports of this node (default: any)", "FIRST-LAST"] = None
    retriever_script: Annotated[Path | None, "your own retriever, in place of launch_retriever.sh", "FILE"] = None
    open_retriever: Annotated[bool, "the retriever asks programs of this machine for no token"] = False
    corpus_path: Annotated[Path | None, 'documents {"id", "contents"} (default: the quick start\'s)', "JSONL"] = None
    index_path: Annotated[Path | None, "index of the corpus (default: made in SLUICE_HOME)", "DIR"] = None
    retriever_name: Annotated[str, "index of the retriever: bm25, e5, bge or dense (default: bm25)"] = "bm25"
    retriever_model: Annotated[str | None, "encoder of a dense index: folder, or name on the hub", "MODEL"] = None
    faiss: Annotated[str, "type of a dense index: flat, hnsw or ivf (default: flat)"] = "flat"
    topk: Annotated[int, "passages when a request names no topk (default: 3)"] = 3
    reward_scorer: Annotated[
        str, "scorer of the bundled reward server, or reward_model:MODEL (default: exact_match)"
    ] = "exact_match"
    no_reward: Annotated[bool, "start no reward server: settings name your own"] = False
    dashboard_port: Annotated[int | None, "run Ray's dashboard and job server there (head only)", "8265"] = None
    dashboard_host: Annotated[str | None, "address of the dashboard (default: 127.0.0.1)", "IP"] = None
    num_cpus: Annotated[int | None, "CPUs that Ray counts on this node (default: all)"] = None
    num_gpus: Annotated[int | None, "GPUs that Ray counts on this node (default: all)"] = None
    resources: Annotated[str | None, "your own names for this node's hardware, such as '{\"v100\": 8}'", "JSON"] = None
    start_timeout_s: Annotated[float, "longest wait for each service to become healthy (default: 300)"] = 300.0
    wait_nodes: Annotated[int, "return when the cluster has N nodes, this one included", "N"] = 0
    block: Annotated[bool, "stay in the foreground; SIGTERM or Ctrl-C stops this node's part"] = False

    @property
    def ray_address(self) -> str:
        """HOST:PORT of the Ray head."""
        return self.address or with_port(self.node_ip, self.ray_port)

    def to_remember(self) -> dict[str, bool | str | int | None]:
        """Return the values that the next start takes for options it is not given."""
        left_out = (*_ONE_START_ONLY, *(["reward_scorer"] if self.no_reward else []))
        kept = {name: getattr(self, name) for name in _DEFAULTS if name not in left_out}
        return {name: str(value) if isinstance(value, Path | PortRange) else value for name, value in kept.items()}


_DEFAULTS = {each.name: each.default for each in fields(StartOptions)}


def read_start_options(arguments: Sequence[str], remembered: Mapping[str, Any] | None = None) -> StartOptions:
    """Return the options of a start: those given, else those that the running cluster remembers, else the defaults.

    Exits 2 on an unknown flag. Raises: SettingsError for an invalid value.
    """
    given = vars(_parser().parse_args(arguments))
    if given.pop("defaults"):
        remembered = None
    if "join" in given and "address" in given:
        raise SettingsError("sluice start: give --join or --address: the join file names the head's address.")
    if "reward_scorer" in given and "no_reward" in given:
        raise SettingsError("sluice start: give --reward-scorer or --no-reward.")
    chosen = {
        name: value for name, value in (_not_overruled(remembered or {}, given) | given).items() if value is not None
    }
    chosen |= {name: read(chosen[name]) for name, read in _READERS.items() if name in chosen}
    chosen = (chosen["ports"].service_ports if "ports" in chosen else {}) | chosen
    if "join" in chosen:
        chosen["address"] = read_join_file(chosen["join"]).ray_address
    options = StartOptions(**chosen)
    for problem in _problems(options):
        raise SettingsError(f"sluice start: {problem}")
    if "node_ip" not in chosen and options.address is not None:
        options = replace(options, node_ip=_address_toward(options.address))
    return options


def is_address(text: str) -> bool:
    """Return whether this is an IP address, of IPv4 or IPv6."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def read_port_range(text: str) -> PortRange:
    """Return the range FIRST-LAST. Raises: SettingsError for an invalid or too small range."""
    found = re.fullmatch(r"(\d{1,5})-(\d{1,5})", text)
    if found is None:
        raise SettingsError(f"sluice start: --ports {text} is not FIRST-LAST. Give a range such as 20000-20999.")
    first, last = int(found[1]), int(found[2])
    if first < _LOWEST_PORT or not first + _MIN_PORTS - 1 <= last <= 65535:
        raise SettingsError(
            f"sluice start: --ports {text}: expected at least {_MIN_PORTS} ports from {_LOWEST_PORT} to 65535. "
            "Give a range such as 20000-20999."
        )
    return PortRange(first, last)


def _read_node_address(given: str) -> str:
    """Return the address in Ray's way of writing. Raises: SettingsError for an address that other nodes cannot use."""
    try:
        address = ipaddress.ip_address(given)
    except ValueError:
        raise SettingsError(f"sluice start: --node-ip {given} is not an IP address. {_WHERE_TO_LOOK}") from None
    if address.is_unspecified or address.is_multicast:
        raise SettingsError(f"sluice start: --node-ip {given} is not the address of one machine. {_WHERE_TO_LOOK}")
    if isinstance(address, ipaddress.IPv6Address) and (
        address.is_loopback or address.is_link_local or address.ipv4_mapped is not None
    ):
        raise SettingsError(
            f"sluice start: --node-ip {given} is an address that means nothing to other nodes. {_WHERE_TO_LOOK}"
        )
    return str(address)


def _read_head_address(given: str) -> str:
    """Return HOST:PORT of a head. Raises: SettingsError for another form."""
    try:
        host, port = host_and_port(given)
    except ValueError:
        raise SettingsError(
            f"sluice start: --address {given} is not HOST:PORT. Give the head's, such as 10.0.0.1:6379 or "
            "[fd00::1]:6379."
        ) from None
    if ":" in host:
        try:
            host = str(ipaddress.IPv6Address(host))
        except ValueError:
            raise SettingsError(
                f"sluice start: --address {given} is not an IPv6 address. Give the head's, such as [fd00::1]:6379."
            ) from None
    return with_port(host, port)


def _address_toward(head: str) -> str:
    """Return this node's address on the route to HOST:PORT; sends nothing. Raises: OperatorError without a route."""
    try:
        return own_address_toward(host_and_port(head)[0])
    except OSError as error:
        raise OperatorError(f"sluice start: --address {head}: {error}. Give an address this node can reach.") from None


def _read_resources(text: str) -> str:
    """Return the JSON object in one canonical form. Raises: SettingsError for anything that a node cannot have."""
    try:
        found = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        found = None
    if isinstance(found, dict) and (own := sorted(filter(is_name_of_ray, found))):
        raise SettingsError(
            f"sluice start: --resources names {', '.join(own)}, which Ray counts by itself. Use names of your own; "
            "--num-cpus and --num-gpus set those that Ray counts."
        )
    if not isinstance(found, dict) or not all(
        type(value) in (int, float) and 0 < value <= MOST_OF_A_RESOURCE and value == int(value)
        for value in found.values()
    ):
        raise SettingsError(
            f"sluice start: --resources {text} is not a JSON object of whole numbers above 0 "
            f"and up to {MOST_OF_A_RESOURCE:g}. "
            """Give one such as '{"v100": 8}'."""
        )
    if any(not name or "," in name for name in found):  # Ray separates names by commas
        raise SettingsError(f"sluice start: --resources {text} has a name that is empty or has a comma. Use another.")
    return json.dumps({name: int(found[name]) for name in sorted(found)})


def _absolute(path: str | Path) -> Path:
    return Path(path).resolve()


def _read_scorer(text: str) -> str:
    """Return the scorer, with the whole path of a reward model's folder."""
    scorer, colon, model = text.partition(":")
    return f"{scorer}:{_absolute(model)}" if colon and Path(model).is_dir() else text


# How the text of an option is read, given or remembered.
_READERS: dict[str, Callable[[str], Any]] = {
    "address": _read_head_address,
    "node_ip": _read_node_address,
    "ports": read_port_range,
    "resources": _read_resources,
    "reward_scorer": _read_scorer,
    **dict.fromkeys(("retriever_script", "corpus_path", "index_path", "join"), _absolute),
}


def _not_overruled(remembered: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the remembered options that this code knows and that no given option makes invalid."""
    overruled = set(_ONE_START_ONLY)
    for option, dependent in (
        ("corpus_path", "index_path"),  # an index belongs to the corpus that it was built from
        ("reward_scorer", "no_reward"),
        ("no_reward", "reward_scorer"),
        ("address", "node_ip"),  # this node's address depends on the network of the head
        ("join", "node_ip"),
        *(("ports", name) for name in _SERVICES),
        *((way, f"dashboard_{part}") for way in ("address", "join") for part in ("port", "host")),  # the head's
    ):
        if option in given:
            overruled.add(dependent)
    return {name: value for name, value in remembered.items() if name in _DEFAULTS and name not in overruled}


def _problems(options: StartOptions) -> Iterator[str]:
    """Yield a sentence for each invalid value."""
    if options.index_path is not None and options.corpus_path is None:
        yield "--index-path needs the --corpus-path that the index was built from."
    if options.retriever_name != _DEFAULTS["retriever_name"] and options.retriever_script is None:
        yield from _dense_problems(options)
    for path in (options.corpus_path, options.retriever_script):
        if path is not None and not path.is_file():
            yield f"{path} is not a file. Give the path of one; --defaults forgets earlier options."
    if options.reward_scorer != _DEFAULTS["reward_scorer"]:
        yield from _scorer_problems(options.reward_scorer)
    if not 0 < options.start_timeout_s <= _MAX_WAIT_S:
        yield (
            f"--start-timeout-s {options.start_timeout_s:g} is not a duration. Give seconds above 0, "
            f"{_MAX_WAIT_S:g} at most."
        )
    for name, least in (("num_cpus", 0), ("num_gpus", 0), ("wait_nodes", 0), ("topk", 1)):
        if (number := getattr(options, name)) is not None and number < least:
            yield f"--{name.replace('_', '-')} {number} is below {least}."
    yield from _dashboard_problems(options)
    yield from _port_problems(options)


def _dense_problems(options: StartOptions) -> Iterator[str]:
    if options.retriever_name not in _DENSE:
        yield f"--retriever-name {options.retriever_name} is not known. Use one of bm25, {', '.join(_DENSE)}."
    elif options.retriever_model is None:
        yield f"--retriever-name {options.retriever_name} needs --retriever-model, such as intfloat/e5-base-v2."
    if options.faiss not in _FAISS:
        yield f"--faiss {options.faiss} is not known. Use one of {', '.join(_FAISS)}."


def _scorer_problems(name: str) -> Iterator[str]:
    from rewards.bundled import SCORERS  # takes half a second to import

    scorer, _, model = name.partition(":")
    if scorer == "reward_model" and not model:
        yield "--reward-scorer reward_model needs a model: its folder, or its name on the hub. Give reward_model:MODEL."
    elif scorer not in SCORERS or (model and scorer != "reward_model"):
        yield (
            f"--reward-scorer {name} is not known. Use one of {', '.join(sorted(set(SCORERS) - {'reward_model'}))}, "
            "reward_model:MODEL, or --no-reward and a reward server of your own."
        )


def _dashboard_problems(options: StartOptions) -> Iterator[str]:
    if options.dashboard_port is not None and options.address is not None:
        yield "--dashboard-port is the head's: this node joins one. Remove it."
    if options.dashboard_host is not None and options.dashboard_port is None:
        yield "--dashboard-host needs --dashboard-port: else no dashboard runs."
    if options.dashboard_host is not None and not is_address(options.dashboard_host):
        yield (
            f"--dashboard-host {options.dashboard_host} is not an IP address. Give one of this node's, or 0.0.0.0 for "
            "all of them."
        )


def _port_problems(options: StartOptions) -> Iterator[str]:
    names = ["retriever", "reward"] + (["ray"] if options.address is None else [])
    names += ["dashboard"] if options.dashboard_port is not None else []
    ports = {f"--{name}-port": int(getattr(options, f"{name}_port")) for name in sorted(names)}
    for flag, port in ports.items():
        if not 1 <= port <= 65535:
            yield f"{flag} {port} is not a port. Use 1 to 65535."
        own = {} if options.ports is None else options.ports.service_ports
        if options.ports is not None and port in options.ports and port not in own.values():
            yield f"{flag} {port} is one of --ports {options.ports}. Use a port outside the range."
    if len(set(ports.values())) < len(ports):
        listed = ", ".join(f"{flag} {port}" for flag, port in ports.items())
        yield f"two services cannot share a port ({listed}). Give each its own."


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sluice start",
        description="Start this node's part of a cluster, or its missing parts. "
        "On a running cluster an option that is not given keeps its earlier value.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    for name, hint in get_type_hints(StartOptions, include_extras=True).items():
        kind, shown, *metavar = get_args(hint)
        flags, kinds = [f"--{name.replace('_', '-')}", *_ALIASES.get(name, ())], get_args(kind) or (kind,)
        if bool in kinds:
            parser.add_argument(*flags, action="store_true", help=shown)
        else:
            read = next((each for each in kinds if each in (int, float, Path)), str)
            parser.add_argument(*flags, type=read, metavar=metavar[0] if metavar else None, help=shown)
    forget = "forget the options of earlier starts of this cluster"
    parser.add_argument("--defaults", action="store_true", default=False, help=forget)
    return parser
