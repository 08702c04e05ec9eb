"""The node's retriever and the bundled reward server: their commands, and whether they are healthy.

Whether a service is healthy is asked of it, never guessed from time.
"""

import sys
import time
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import httpx

from deploy.cluster.home import Home
from deploy.cluster.options import LOOPBACK, StartOptions
from deploy.cluster.processes import MARK, find, last_lines, launch
from protocol.errors import OperatorError
from protocol.http.bearer import read_token
from protocol.node.code_digest import code_digest
from protocol.node.home import ProcessRecord

_ROOT = Path(__file__).resolve().parents[2]
_ASK_S = 5.0
_POLL_S = 0.05


@dataclass(frozen=True)
class Service:
    """A service as the options want it. code: digest of what it runs; one that runs other code is not the same."""

    name: str
    url: str
    command: tuple[str, ...]
    code: str

    def is_in(self, record: ProcessRecord) -> bool:
        """Return whether a process was started as this one would be now."""
        return (record.command, record.code) == (self.command, self.code)

    def launch(self, home: Home) -> ProcessRecord:
        environment = {"SLUICE_HOME": str(home.root), MARK: str(home.ray_folder), "OMP_NUM_THREADS": "1"}
        return launch(self.name, self.command, self.code, home.logs / f"{self.name}.log", environment, self.url)


def wanted_services(options: StartOptions, home: Home) -> dict[str, Service]:
    """Return the services of a node by name: the retriever and, unless it was declined, the reward server."""
    services = [_retriever(options, home), *([_reward(options, home)] if options.reward_scorer is not None else [])]
    return {service.name: service for service in services}


def _retriever(options: StartOptions, home: Home) -> Service:
    """Return launch_retriever.sh or the user's own script in its place, with the same arguments."""
    corpus = options.corpus_path or home.quickstart / "corpus.jsonl"
    index = options.index_path or home.root / "cache" / f"index-{corpus.stem}"
    arguments = ["--index-path", str(index), "--corpus-path", str(corpus), "--topk", str(options.topk)]
    arguments += ["--port", str(options.retriever_port), "--token-file", str(home.token_file)]
    script = options.retriever_script or _ROOT / "deploy" / "launch_retriever.sh"
    return Service(
        name="retriever",
        url=f"http://{LOOPBACK}:{options.retriever_port}/retrieve",
        command=("bash", str(script), *arguments),
        code=_script_digest(script) if options.retriever_script else code_digest(("protocol", "retriever")),
    )


def _reward(options: StartOptions, home: Home) -> Service:
    module = (sys.executable, "-m", "rewards.serve", "--scorer", str(options.reward_scorer))
    return Service(
        name="reward",
        url=f"http://{LOOPBACK}:{options.reward_port}/",
        command=(*module, "--port", str(options.reward_port), "--token-file", str(home.token_file)),
        code=code_digest(("protocol", "rewards")),
    )


def _script_digest(script: Path) -> str:
    """Return a hash of the user's script; what it runs in its turn is theirs. A missing one fails at its start."""
    return sha256(script.read_bytes()).hexdigest()[:16] if script.is_file() else ""


def await_healthy(record: ProcessRecord, token_file: Path, timeout_s: float) -> None:
    """Return when the service says that it is healthy.

    Raises: OperatorError with the end of its log when it ended, or did not become healthy within timeout_s.
    """
    deadline = time.monotonic() + timeout_s
    while not is_healthy(record, token_file):
        if find(record) is None:
            raise OperatorError(
                f"The {record.name} ended at its start: {last_lines(Path(record.log))} (log: {record.log})"
            )
        if time.monotonic() > deadline:
            raise OperatorError(
                f"The {record.name} at {record.url} was not healthy within {timeout_s:g} s: "
                f"{last_lines(Path(record.log))} (log: {record.log}). Raise --start-timeout-s if it needs longer."
            )
        time.sleep(_POLL_S)  # nothing tells when a port starts to answer: asked 20 times a second until then


def is_healthy(record: ProcessRecord, token_file: Path) -> bool:
    """Return whether the recorded process runs and answers.

    A retriever without GET /health (Search-R1's has none) is asked for no passages instead.
    """
    if find(record) is None or record.url is None:
        return False
    headers = {"authorization": f"Bearer {read_token(token_file)}"}
    # trust_env: a proxy of the user's would be asked for loopback addresses.
    with httpx.Client(timeout=_ASK_S, trust_env=False) as client:
        try:
            status = client.get(httpx.URL(record.url).join("/health")).status_code
            if status in (404, 405, 501) and record.name == "retriever":
                nothing = {"queries": [], "topk": 1, "return_scores": True}
                status = client.post(record.url, json=nothing, headers=headers).status_code
        except httpx.HTTPError:
            return False
    return status == 200
