"""The services that a start launches on a node: the retriever and the bundled reward server, with their commands."""

import os
import sys
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from deploy.cluster.joining import is_reachable
from deploy.cluster.options import LOOPBACK, StartOptions
from deploy.node.home import Home
from deploy.node.processes import MARK, launch, search_path
from protocol.addresses import with_port
from protocol.node.home import ProcessRecord
from protocol.node.identity import code_digest

_ROOT = Path(__file__).resolve().parents[2]
SERVICE_GPUS = "SLUICE_SERVICE_GPUS"


@dataclass(frozen=True)
class Service:
    """What a node needs to launch a service."""

    name: str  # retriever or reward
    url: str  # URL that takes its requests
    command: tuple[str, ...]
    code: str  # digest of its code: a service with other code is restarted
    folder: Path  # working folder
    is_bundled: bool = True  # False: a user's script, which sees all GPUs

    def launch(self, home: Home) -> ProcessRecord:
        """Start the process and return its record."""
        environment = {
            "OMP_NUM_THREADS": "1",  # a thread for each core would slow down engines and ranks
            **os.environ,
            "SLUICE_HOME": str(home.root),
            MARK: str(home.ray_folder),
            "PATH": search_path(),
        }
        if self.is_bundled:
            # On a GPU that Ray lends to a rank or a server, a model would take memory that they count on.
            environment["CUDA_VISIBLE_DEVICES"] = os.environ.get(SERVICE_GPUS, "")
        log = home.logs / f"{self.name}.log"
        return launch(self.name, self.command, self.code, log, environment, self.url, self.folder)


def services_of(options: StartOptions, home: Home) -> dict[str, Service]:
    """Return the services of a node by name: the retriever and, unless --no-reward was given, the reward server."""
    services = [_retriever(options, home)]
    if not options.no_reward:
        services.append(_reward(options, home))
    return {service.name: service for service in services}


def shared_retriever_url(options: StartOptions) -> str | None:
    """Return the URL at which other nodes reach this node's retriever when theirs is down; None: it is not shared.

    A user's own retriever is not shared, because it may listen at another address. A retriever without a token
    (--open) serves this machine only.
    """
    if not is_reachable(options.node_ip) or options.open_retriever or options.retriever_script is not None:
        return None
    return f"http://{with_port(options.node_ip, options.retriever_port)}/retrieve"


def _retriever(options: StartOptions, home: Home) -> Service:
    """Return the bundled retriever, or the user's own script with the same arguments."""
    corpus = options.corpus_path or home.quickstart / "corpus.jsonl"
    contents = sha256(f"{corpus.absolute()}\n{options.retriever_name}\n{options.retriever_model}".encode()).hexdigest()
    index = options.index_path or home.root / "cache" / f"index-{corpus.stem}-{contents[:8]}"
    arguments = ["--index-path", str(index), "--corpus-path", str(corpus), "--topk", str(options.topk)]
    arguments += ["--port", str(options.retriever_port)]
    if options.retriever_model is not None:
        arguments += ["--retriever-name", options.retriever_name, "--retriever-model", options.retriever_model]
        arguments += ["--faiss", options.faiss]
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
        is_bundled=options.retriever_script is None,
    )


def _reward(options: StartOptions, home: Home) -> Service:
    scorer, _, model = options.reward_scorer.partition(":")
    arguments = ["--scorer", scorer, "--port", str(options.reward_port), "--token-file", str(home.token_file)]
    if model:
        arguments += ["--model", model, "--model-dtype", "bfloat16" if os.environ.get(SERVICE_GPUS) else "float32"]
    return Service(
        name="reward",
        url=f"http://{LOOPBACK}:{options.reward_port}/",
        command=(sys.executable, "-m", "rewards.serve", *arguments),
        code=code_digest(("protocol", "rewards")),
        folder=_ROOT,
    )


def _script_digest(script: Path) -> str:
    """Return a digest of the user's script; "" for a missing file, whose launch reports it."""
    return sha256(script.read_bytes()).hexdigest()[:16] if script.is_file() else ""
