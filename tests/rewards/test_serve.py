"""The reward service over real HTTP, in a thread and as a process."""

import json
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from rewards.bundled import scorer_named
from rewards.service import RewardService
from rewards.user_function import load_scorer
from rewards.workers import Workers
from tests.fakes.http_servers import module_serving, run_module, serving
from tests.fakes.waiting import wait_until


@pytest.fixture(scope="module")
def exact_match() -> Iterator[httpx.Client]:
    with (
        serving(RewardService(scorer_named("exact_match"), "exact_match").app()) as address,
        httpx.Client(base_url=address, trust_env=False) as http,
    ):
        yield http


def body_of(*answers: str, labels: list[Any]) -> dict[str, Any]:
    prompts = [f"question {i} " for i in range(len(answers))]
    queries = [f"{prompt}<answer>{answer}</answer>" for prompt, answer in zip(prompts, answers, strict=True)]
    return {"query": queries, "prompts": prompts, "labels": labels}


@pytest.mark.parametrize("path", ["/", "/score", "/get_reward"])
def test_post_to_any_path_gives_aligned_rewards(exact_match: httpx.Client, path: str) -> None:
    answer = exact_match.post(path, json=body_of("a1", "b", "c", labels=["a1", "x", ["y", "c"]]))
    assert (answer.status_code, answer.json()) == (200, {"rewards": [1.0, 0.0, 1.0]})


def test_post_of_no_samples_gives_no_rewards(exact_match: httpx.Client) -> None:
    assert exact_match.post("/", json={"query": []}).json() == {"rewards": []}


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        (body_of("a", labels=[None]), "$.labels[0] is None, expected the answer's text, a list of texts or a target"),
        ({"query": ["a"]}, "$.labels[0] is None, expected the answer's text, a list of texts or a target"),
        ({"query": ["a"], "labels": []}, "$ Value error, labels has 0 entries, query has 1"),
        ({"query": "a"}, "$.query Input should be a valid array, got 'a'"),
        ({"queries": ["a"]}, "$.query Field required"),
    ],
)
def test_post_names_the_invalid_field(exact_match: httpx.Client, body: dict[str, Any], detail: str) -> None:
    answer = exact_match.post("/", json=body)
    assert (answer.status_code, answer.json()) == (422, {"detail": detail, "path": detail.partition(" ")[0]})


def test_post_refuses_a_label_that_is_no_number_and_does_not_score_it_as_wrong(exact_match: httpx.Client) -> None:
    # No JSON, but what json.dumps of Python writes for a missing number.
    answer = exact_match.post("/", content='{"query": ["<answer>nan</answer>"], "labels": [NaN]}')
    assert (answer.status_code, answer.json()["path"]) == (422, "$.labels[0]")


def test_openapi_shows_the_bodies(exact_match: httpx.Client) -> None:
    assert exact_match.get("/docs").status_code == 200
    route = exact_match.get("/openapi.json").json()["paths"]["/{path}"]["post"]
    shown = route["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert set(shown) == {"query", "prompts", "labels", "columns"}
    assert route["responses"]["200"]["content"]["application/json"]["schema"] == {
        "$ref": "#/components/schemas/RewardReply"
    }


def test_health_names_the_scorer(exact_match: httpx.Client) -> None:
    assert exact_match.get("/health").json() == {"status": "ok", "scorer": "exact_match"}


def test_metrics_count_samples(exact_match: httpx.Client) -> None:
    def count() -> float:
        lines = exact_match.get("/metrics").text.splitlines()
        return float(next(line for line in lines if line.startswith("sluice_reward_samples_total ")).split()[1])

    before = count()
    exact_match.post("/", json=body_of("a", "b", labels=["a", "b"]))
    assert count() == before + 2


def test_a_function_that_raises_gives_500_with_type_message_and_sample(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text("def score(s):\n    return 1 / len(s.label)\n")
    with serving(RewardService(load_scorer(str(tmp_path / "f.py")), "f.py").app()) as address:
        body = {"query": ["a", "b"], "labels": ["x", ""]}
        answer = httpx.post(address, json=body, headers={"idempotency-key": "p7/3"}, trust_env=False)
        assert answer.status_code == 500
        assert answer.json() == {
            "detail": "the reward function failed on sample 1: ZeroDivisionError: division by zero",
            "type": "ZeroDivisionError",
            "message": "division by zero",
            "sample": 1,
            "key": "p7/3",
        }


def test_logs_of_some_samples_only_are_omitted(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text(
        "from rewards.sample import Score\n"
        "def score(s):\n"
        "    return Score(1.0, 0.5, {'all': 2.0, **({'one': 3.0} if s.label else {})})\n"
    )
    with serving(RewardService(load_scorer(str(tmp_path / "f.py")), "f.py").app()) as address:
        answer = httpx.post(address, json={"query": ["a", "b"], "labels": [1, 0]}, trust_env=False)
        assert answer.json() == {"rewards": [1.0, 1.0], "scores": [0.5, 0.5], "extra_logs": {"all": [2.0, 2.0]}}


def test_serve_as_a_process_asks_for_the_token(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("0123456789abcdef")
    arguments = ("--scorer", "exact_match", "--token-file", str(tmp_path / "token"))
    with module_serving("rewards.serve", *arguments) as (address, _):
        assert httpx.get(f"{address}/health", trust_env=False).status_code == 200
        body = body_of("a", labels=["a"])
        assert httpx.post(address, json=body, trust_env=False).status_code == 401
        headers = {"authorization": "Bearer 0123456789abcdef"}
        assert httpx.post(address, json=body, headers=headers, trust_env=False).json() == {"rewards": [1.0]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--scorer", "vibes"),
            "rewards: --scorer vibes is not known. "
            "Choose one of: code_tests, exact_match, format, math_answer, reward_model.\n",
        ),
        (
            ("--function", "/nowhere.py"),
            "rewards: --function /nowhere.py is not a Python file. Expected FILE.py or FILE.py:NAME.\n",
        ),
    ],
)
def test_serve_exits_1_with_one_sentence(arguments: tuple[str, str], message: str) -> None:
    finished = run_module("rewards.serve", *arguments, "--port", "0")
    assert (finished.returncode, finished.stdout, finished.stderr) == (1, "", message)


SLOW = """
import threading

calls, begun, gate = [], threading.Semaphore(0), threading.Event()


def score(sample):
    calls.append(sample.query)
    begun.release()
    assert gate.wait(30)
    return 1.0
"""


class CountingWorkers(Workers):
    """num_asked: calls that somebody waits for, begun or not."""

    num_asked = 0

    async def run(self, function: Callable[[], Any]) -> Any:
        self.num_asked += 1
        try:
            return await super().run(function)
        finally:
            self.num_asked -= 1


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[tuple[str, Any, CountingWorkers]]:
    """Yield a service whose function waits, the function's module, and its two workers."""
    (tmp_path / "slow.py").write_text(SLOW)
    workers = CountingWorkers(2)
    scorer = load_scorer(str(tmp_path / "slow.py"), workers)
    module = sys.modules["sluice_user_reward"]
    with serving(RewardService(scorer, "slow", workers).app()) as address:
        yield address, module, workers
        module.gate.set()


def _ask(address: str, query: str) -> "socket.socket":
    """Return the connection of a client that has sent its request; it leaves by closing it."""
    where, body = urlsplit(address), json.dumps({"query": [query]}).encode()
    client = socket.create_connection((where.hostname, where.port), timeout=60)
    head = f"POST / HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    client.sendall(head.encode() + body)
    return client


def test_call_whose_client_has_left_is_not_begun(slow: tuple[str, Any, CountingWorkers]) -> None:
    address, module, workers = slow
    staying = [_ask(address, f"staying {i}") for i in range(2)]
    for _ in staying:
        assert module.begun.acquire(timeout=20)
    leaving = [_ask(address, f"leaving {i}") for i in range(4)]
    wait_until(lambda: workers.num_asked == 6)
    for client in leaving:
        client.close()
    wait_until(lambda: workers.num_asked == 2)
    staying.append(_ask(address, "later"))
    module.gate.set()
    for client in staying:
        assert client.recv(1000).startswith(b"HTTP/1.1 200 ")
        client.close()
    assert sorted(module.calls) == ["later", "staying 0", "staying 1"]


def test_health_tells_when_every_worker_runs_for_nobody(
    slow: tuple[str, Any, CountingWorkers], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, module, workers = slow

    def health() -> tuple[int, str]:
        answer = httpx.get(f"{address}/health", trust_env=False)
        return answer.status_code, answer.json()["status"]

    def ask_and_leave(query: str) -> None:
        client = _ask(address, query)
        assert module.begun.acquire(timeout=20)
        client.close()
        wait_until(lambda: workers.num_asked == 0)

    ask_and_leave("one")
    monkeypatch.setattr("rewards.service._STUCK_S", 0.001)
    assert health() == (200, "ok")  # the other worker is free
    ask_and_leave("two")
    monkeypatch.setattr("rewards.service._STUCK_S", 0.05)
    wait_until(lambda: health() == (503, "stuck"))
    monkeypatch.setattr("rewards.service._STUCK_S", 600.0)
    assert health() == (200, "ok")  # not for so long
    monkeypatch.setattr("rewards.service._STUCK_S", 0.05)
    module.gate.set()
    wait_until(lambda: health() == (200, "ok"))


@pytest.mark.parametrize("number", ["0", "-1", "two"])
def test_serve_refuses_a_number_of_workers_that_is_none(number: str) -> None:
    finished = run_module("rewards.serve", "--scorer", "exact_match", "--workers", number)
    assert finished.returncode == 2
    assert f"--workers: is {number}, expected a number of at least 1" in finished.stderr
