"""Whether a service of a node is healthy: asked of it, never guessed from time."""

import time
from pathlib import Path

import httpx

from deploy.node.processes import find, last_lines
from protocol.errors import OperatorError
from protocol.http.bearer import read_token
from protocol.node.home import ProcessRecord

_ASK_S = 5.0
_POLL_S = 0.05


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
