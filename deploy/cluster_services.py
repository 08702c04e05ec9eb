"""The node's retriever and the bundled reward server: their commands, and whether they are healthy.

Called by `deploy.cluster`. Whether a service is healthy is asked of it, never guessed from time.
"""

import sys
import time
from pathlib import Path

import httpx

from deploy.cluster_home import Home
from deploy.cluster_options import LOOPBACK, StartOptions
from deploy.cluster_processes import MARK, find, last_lines, launch
from protocol.bearer import read_token
from protocol.errors import OperatorError
from protocol.home import ProcessRecord

_ROOT = Path(__file__).resolve().parents[1]
_ASK_S = 5.0
_POLL_S = 0.05


def launch_retriever(options: StartOptions, home: Home) -> ProcessRecord:
    """Start the retriever, or the user's own script in its place, with the same arguments."""
    url = f"http://{LOOPBACK}:{options.retriever_port}/retrieve"
    return launch("retriever", retriever_command(options, home), home.logs / "retriever.log", _environment(home), url)


def launch_reward(options: StartOptions, home: Home) -> ProcessRecord:
    """Start the bundled reward server."""
    url = f"http://{LOOPBACK}:{options.reward_port}/"
    return launch("reward", reward_command(options, home), home.logs / "reward.log", _environment(home), url)


def retriever_command(options: StartOptions, home: Home) -> list[str]:
    """Return the retriever's command: launch_retriever.sh or the user's script, then its arguments."""
    corpus = options.corpus_path or home.quickstart / "corpus.jsonl"
    index = options.index_path or home.root / "cache" / f"index-{corpus.stem}"
    arguments = ["--index-path", str(index), "--corpus-path", str(corpus), "--topk", str(options.topk)]
    arguments += ["--port", str(options.retriever_port), "--token-file", str(home.token_file)]
    script = options.retriever_script or _ROOT / "deploy" / "launch_retriever.sh"
    return ["bash", str(script), *arguments]


def reward_command(options: StartOptions, home: Home) -> list[str]:
    """Return the reward server's command."""
    module = [sys.executable, "-m", "rewards.serve", "--scorer", str(options.reward_scorer)]
    return [*module, "--port", str(options.reward_port), "--token-file", str(home.token_file)]


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


def _environment(home: Home) -> dict[str, str]:
    return {"SLUICE_HOME": str(home.root), MARK: str(home.ray_folder), "OMP_NUM_THREADS": "1"}
