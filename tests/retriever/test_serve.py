"""The retriever's command lines, as processes."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.fakes.http_servers import module_serving, run_module

TOKEN = "0123456789abcdef"


@pytest.fixture
def corpus_path(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    lines = [{"id": str(i), "contents": f'"Town {i}"\nTown {i} is a town.'} for i in range(5)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_serve_answers_with_the_token_only_and_health_to_all(tmp_path: Path, corpus_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    built = run_module("retriever.build", "--corpus-path", str(corpus_path), "--index-path", str(tmp_path / "index"))
    assert built.returncode == 0, built.stderr
    arguments = ("--index-path", str(tmp_path / "index"), "--corpus-path", str(corpus_path))
    with (
        module_serving("retriever.serve", *arguments, "--token-file", str(tmp_path / "token")) as (address, _),
        httpx.Client(base_url=address, trust_env=False) as http,
    ):
        assert http.get("/health").json()["num_documents"] == 5
        assert http.post("/retrieve", json={"queries": ["3"]}).status_code == 401
        wrong = {"authorization": "Bearer 0123456789abcdeX"}
        assert http.post("/retrieve", json={"queries": ["3"]}, headers=wrong).status_code == 401
        right = {"authorization": f"Bearer {TOKEN}"}
        found = http.post("/retrieve", json={"queries": ["3"]}, headers=right).json()
        assert [document["id"] for document in found["result"][0]] == ["3"]


def test_serve_answers_on_another_address_too(tmp_path: Path, corpus_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    arguments = ("--index-path", str(tmp_path / "index"), "--corpus-path", str(corpus_path), "--also-on", "127.0.0.2")
    with module_serving("retriever.serve", *arguments, "--token-file", str(tmp_path / "token")) as (address, _):
        for host in ("127.0.0.1", "127.0.0.2"):
            url = address.replace("127.0.0.1", host) + "/retrieve"
            right = {"authorization": f"Bearer {TOKEN}"}
            assert httpx.post(url, json={"queries": ["3"]}, trust_env=False).status_code == 401
            assert httpx.post(url, json={"queries": ["3"]}, headers=right, trust_env=False).status_code == 200


def test_open_service_needs_no_token_on_this_machine(tmp_path: Path, corpus_path: Path) -> None:
    """As Search-R1's own client calls it: no header, one list of queries."""
    (tmp_path / "token").write_text(TOKEN)
    arguments = ("--index-path", str(tmp_path / "index"), "--corpus-path", str(corpus_path), "--open")
    with module_serving("retriever.serve", *arguments, "--token-file", str(tmp_path / "token")) as (address, _):
        body = {"queries": ["town 3"], "topk": 1, "return_scores": True}
        found = httpx.post(f"{address}/retrieve", json=body, trust_env=False).json()
    assert found["result"][0][0]["document"]["id"] == "3"


def test_service_listens_elsewhere_with_a_token(tmp_path: Path, corpus_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    arguments = ("--index-path", str(tmp_path / "index"), "--corpus-path", str(corpus_path), "--port", "0")
    finished = run_module("retriever.serve", *arguments, "--host", "192.0.2.1", "--token-file", str(tmp_path / "token"))
    assert (finished.returncode, finished.stdout) == (1, "")
    assert finished.stderr.startswith("retriever: cannot listen on 192.0.2.1 port 0")


def test_serve_imports_nothing_that_is_slow_to_import() -> None:
    script = "import sys, retriever.serve; print({'torch', 'numba', 'vllm', 'ray', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "set()\n"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--retriever-name", "vibes"), "retriever: --retriever-name vibes is not known. Choose one of: bm25, e5, "),
        (("--retriever-name", "e5"), "retriever: --retriever-name e5 needs --retriever-model"),
        (("--corpus-path", "/nowhere.jsonl"), "retriever: the corpus /nowhere.jsonl cannot be read"),
        (("--token-file", "/nowhere"), "token file /nowhere: cannot be read"),
        (("--host", "not an address"), "retriever: on --host not an address other machines can search too"),
        (("--also-on", "10.9.8.7"), "retriever: on --also-on 10.9.8.7 other machines can search too"),
        (("--open", "--host=0.0.0.0"), "retriever: on --host 0.0.0.0 other machines can search too"),
        (("--host", "0.0.0.0"), "retriever: on --host 0.0.0.0 other machines can search too"),  # noqa: S104
    ],
)
def test_serve_exits_1_with_one_sentence(
    tmp_path: Path, corpus_path: Path, change: tuple[str, str], message: str
) -> None:
    arguments = ("--index-path", str(tmp_path / "index"), "--corpus-path", str(corpus_path), "--port", "0")
    finished = run_module("retriever.serve", *arguments, *change)
    assert (finished.returncode, finished.stdout) == (1, "")
    assert finished.stderr.startswith(message)
    assert finished.stderr.count("\n") == 1


def test_lucene_folder_is_refused_with_the_cure(tmp_path: Path, corpus_path: Path) -> None:
    (tmp_path / "bm25").mkdir()
    (tmp_path / "bm25" / "segments_2").touch()
    arguments = ("--index_path", str(tmp_path / "bm25"), "--corpus_path", str(corpus_path), "--faiss_gpu")
    finished = run_module("retriever.serve", *arguments, "--port", "0")
    assert finished.returncode == 1
    assert "is a Lucene index, which only Pyserini reads. Give a new folder" in finished.stderr


def test_serve_says_when_the_port_is_taken(tmp_path: Path, corpus_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        arguments = ("--index-path", str(tmp_path / "index"), "--corpus-path", str(corpus_path), "--port", port)
        finished = run_module("retriever.serve", *arguments)
    assert (finished.returncode, finished.stdout) == (1, "")
    assert finished.stderr == (
        f"retriever: port {port} of 127.0.0.1 is taken. Stop that process, or choose another --port.\n"
    )
