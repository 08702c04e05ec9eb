"""The services that a start wants on its node: the retriever and the bundled reward server, with their commands."""

import os
import sys
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from deploy.cluster.join_file import is_reachable
from deploy.cluster.options.start_options import LOOPBACK, StartOptions
from deploy.node.home import Home
from deploy.node.processes import MARK, launch
from protocol.addresses import with_port
from protocol.node.code_digest import code_digest
from protocol.node.home import ProcessRecord

_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Service:
    """A service as the options want it."""

    name: str  # retriever or reward
    url: str  # where it is asked
    command: tuple[str, ...]  # program and arguments
    code: str  # digest of what it runs
    folder: Path  # where it works

    def launch(self, home: Home) -> ProcessRecord:
        environment = {**os.environ, "SLUICE_HOME": str(home.root), MARK: str(home.ray_folder), "OMP_NUM_THREADS": "1"}
        log = home.logs / f"{self.name}.log"
        return launch(self.name, self.command, self.code, log, environment, self.url, self.folder)


def wanted_services(options: StartOptions, home: Home) -> dict[str, Service]:
    """Return the services of a node by name: the retriever and, unless it was declined, the reward server."""
    services = [_retriever(options, home), *([_reward(options, home)] if options.reward_scorer is not None else [])]
    return {service.name: service for service in services}


def shared_retriever_url(options: StartOptions) -> str | None:
    """Return where other nodes search this node's retriever while their own is down; None: they do not.

    One of the user's own listens where it will, and one that asks for no token is for this machine alone.
    """
    if not is_reachable(options.node_ip) or options.open_retriever or options.retriever_script is not None:
        return None
    return f"http://{with_port(options.node_ip, options.retriever_port)}/retrieve"


def _retriever(options: StartOptions, home: Home) -> Service:
    """Return launch_retriever.sh or the user's own script in its place, with the same arguments."""
    corpus = options.corpus_path or home.quickstart / "corpus.jsonl"
    index = options.index_path or home.root / "cache" / f"index-{corpus.stem}"
    arguments = ["--index-path", str(index), "--corpus-path", str(corpus), "--topk", str(options.topk)]
    arguments += ["--port", str(options.retriever_port)]
    arguments += ["--open"] if options.open_retriever else ["--token-file", str(home.token_file)]
    if shared_retriever_url(options) is not None:
        arguments += ["--also-on", options.node_ip]
    script = options.retriever_script or _ROOT / "deploy" / "launch_retriever.sh"
    return Service(
        name="retriever",
        url=f"http://{LOOPBACK}:{options.retriever_port}/retrieve",
        command=("bash", str(script), *arguments),
        code=_script_digest(script) if options.retriever_script else code_digest(("protocol", "retriever")),
        folder=Path.cwd() if options.retriever_script else _ROOT,
    )


def _reward(options: StartOptions, home: Home) -> Service:
    module = (sys.executable, "-m", "rewards.serve", "--scorer", str(options.reward_scorer))
    return Service(
        name="reward",
        url=f"http://{LOOPBACK}:{options.reward_port}/",
        command=(*module, "--port", str(options.reward_port), "--token-file", str(home.token_file)),
        code=code_digest(("protocol", "rewards")),
        folder=_ROOT,
    )


def _script_digest(script: Path) -> str:
    """Return a hash of the user's script; what it runs in its turn is theirs. A missing one fails at its start."""
    return sha256(script.read_bytes()).hexdigest()[:16] if script.is_file() else ""
