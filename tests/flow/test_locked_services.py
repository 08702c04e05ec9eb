"""The cluster's HTTP services as processes, met by somebody without the token, and by bodies that never end."""

import http.client
import json
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.fakes.http_servers import module_serving

TOKEN = "a-secret-that-must-not-be-seen-0123456789"
MIB = 1 << 20


@contextmanager
def service(name: str, folder: Path) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """Yield the address and process of "rewards" or "retriever", which asks for TOKEN."""
    token = folder / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    corpus = folder / "corpus.jsonl"
    corpus.write_text('{"id": "a", "contents": "\\"Oslo\\"\\nOslo is a capital."}\n')
    options = {
        "rewards": ["--scorer", "exact_match"],
        "retriever": ["--index-path", str(folder / "index"), "--corpus-path", str(corpus)],
    }
    with module_serving(f"{name}.serve", *options[name], "--token-file", str(token)) as running:
        yield running


@pytest.fixture(scope="module", params=["rewards", "retriever"])
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str, "subprocess.Popen[str]"]]:
    with service(request.param, tmp_path_factory.mktemp(request.param)) as (address, process):
        yield request.param, address, process


PATHS = {"rewards": "/score", "retriever": "/retrieve"}
BODIES: dict[str, Any] = {
    "rewards": {"query": ["<answer>a</answer>"], "labels": ["a"]},
    "retriever": {"queries": ["Oslo"], "topk": 1, "return_scores": False},
}
Running = tuple[str, str, "subprocess.Popen[str]"]


@pytest.mark.parametrize(
    "header", [None, "Bearer", "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}"]
)
@pytest.mark.parametrize("path", ["service", "/metrics", "/", "/docs", "//health", "/health/"])
def test_service_answers_401_without_its_token(running: Running, path: str, header: str | None) -> None:
    name, address, _ = running
    headers = {} if header is None else {"authorization": header}
    url = address + (PATHS[name] if path == "service" else path)
    for method in ("GET", "POST", "PUT", "OPTIONS"):
        answer = httpx.request(method, url, json=BODIES[name], headers=headers, trust_env=False)
        assert answer.status_code == 401


def test_service_answers_with_its_token(running: Running) -> None:
    name, address, _ = running
    headers = {"authorization": f"Bearer {TOKEN}"}
    answer = httpx.post(address + PATHS[name], json=BODIES[name], headers=headers, trust_env=False)
    assert answer.status_code == 200


def test_health_is_open_and_tells_no_secret(running: Running) -> None:
    _, address, _ = running
    answer = httpx.get(f"{address}/health", trust_env=False)
    assert (answer.status_code, TOKEN in answer.text) == (200, False)


@pytest.mark.parametrize("is_chunked", [True, False])
def test_body_over_the_limit_is_answered_413_and_not_kept(running: Running, is_chunked: bool) -> None:
    name, address, process = running
    limit_mib = {"rewards": 64, "retriever": 16}[name]
    before = _resident_mib(process.pid)
    status, answer = _upload(address, PATHS[name], 2 * limit_mib, is_chunked)
    assert (status, answer["detail"]) == (413, f"the body is over {limit_mib * MIB} bytes")
    assert _resident_mib(process.pid) - before < 1.7 * limit_mib


def test_head_that_does_not_end_is_cut_off_before_the_token_is_asked_for(running: Running) -> None:
    _, address, _ = running
    where = urlsplit(address)
    num_sent = 0
    with socket.create_connection((where.hostname, where.port), timeout=10) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\nx: ")
        try:
            while num_sent < 64 * MIB:
                num_sent += connection.send(b"y" * 65536)
        except ConnectionError:
            pass  # it has hung up
    assert num_sent < 64 * MIB


def _upload(address: str, path: str, size_mib: int, is_chunked: bool) -> tuple[int, dict[str, Any]]:
    """Return the status and the answer to a body of this size, which begins as JSON."""
    where = urlsplit(address)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=30)
    connection.putrequest("POST", path)
    connection.putheader("authorization", f"Bearer {TOKEN}")
    if is_chunked:
        connection.putheader("transfer-encoding", "chunked")
    else:
        connection.putheader("content-length", str(size_mib * MIB))
    connection.endheaders()
    piece = b'[{"' + b" " * (MIB - 3)
    try:
        for _ in range(size_mib):
            connection.send(b"%x\r\n%s\r\n" % (len(piece), piece) if is_chunked else piece)
    except ConnectionError:
        pass  # it has answered, and reads no further
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    return response.status, answer


def _resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 / MIB
