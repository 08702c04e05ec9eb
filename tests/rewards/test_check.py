"""`sluice check-reward`: a good endpoint told from bad ones, in words that say what to change."""

import asyncio
import json
import socket
import threading
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import OperatorError
from rewards.bundled import scorer_named
from rewards.check import Endpoint, Finding, Probe, _seconds, findings, listener_of, read_headers, read_samples
from rewards.function_process import load_scorer
from rewards.service import RewardService
from tests.fakes.http_servers import (
    Answer,
    Received,
    ScriptedServer,
    free_address,
    run_module,
    scripted_server,
    serving,
)

SAMPLES = [Probe("1+1?", "<answer>2</answer>", "2"), Probe("2+2?", "<answer>5</answer>", "4")]


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as scripted:
        yield scripted


def _found(url: str, timeout_s: float = 30.0) -> list[Finding]:
    async def gathered() -> list[Finding]:
        return [finding async for finding in findings(Endpoint(url, {}, timeout_s), *SAMPLES)]

    return asyncio.run(gathered())


def _rewards(received: Received) -> list[float]:
    pairs = zip(received.body["query"], received.body["labels"], strict=True)
    return [float(f"<answer>{label}<" in query) for query, label in pairs]


def test_good_endpoint_has_nothing_to_change() -> None:
    with serving(RewardService(scorer_named("exact_match"), "exact_match").app()) as address:
        found = _found(address)
        finished = run_module("rewards.check", address)
        as_json = run_module("rewards.check", address, "--json")
    assert [finding.kind for finding in found] == ["ok", "ok"]
    assert found[1].fact == "Two samples in one request got a reward each: batch_size may be above 1."
    assert (finished.returncode, finished.stderr) == (0, "")
    assert finished.stdout.splitlines()[-1] == f"{address} can be used by a run."
    assert json.loads(as_json.stdout)["findings"][1] == asdict(found[1])


@pytest.mark.parametrize(
    ("answer", "fact", "advice"),
    [
        (Answer({"detail": "no"}, 401), "It answered 401", "headers_env"),
        (Answer({"detail": "Not Found"}, 404), "It answered 404", "add the service's own, such as /get_reward"),
        (Answer({"detail": "Method"}, 405), "It answered 405", "must accept POST"),
        (Answer({"detail": "field required"}, 422), "It answered 422", "The service expects other fields"),
        (Answer("slow down", 429), "It answered 429", "lower max_concurrency"),
        (Answer("Traceback", 500), 'It answered 500: "Traceback"', "See the log of the service"),
        (Answer("loading", 503), "It answered 503", "starting or overloaded"),
        (Answer(b"", 307, headers={"location": "/x"}), "It redirects to '/x'", "Give the address"),
        (Answer(b"<html>hello</html>"), "is not JSON", "That is a web page"),
        (Answer({"score": 1.0}), "$.rewards is missing; the reply has the keys ['score']", 'The form is {"rewards"'),
        (
            Answer({"rewards": []}),
            "$.rewards has 0 entries, expected 1",
            "Return one finite number for each of the 1 queries",
        ),
        (
            Answer({"rewards": [float("nan")]}),
            "expected a finite number",
            "Return one finite number for each of the 1 queries",
        ),
        (
            Answer({"rewards": ["0.5"]}),
            "$.rewards[0] is '0.5', expected a number",
            "Return one finite number for each of the 1 queries",
        ),
        (
            Answer({"rewards": [1.0], "scores": [None]}),
            "$.scores[0] is None",
            "Return one finite number for each of the 1 queries",
        ),
        (Answer({"rewards": [1.0], "pad": "x" * (1 << 20)}), "over 1048576", "Send the rewards only"),
    ],
)
def test_bad_answer_is_a_problem_with_advice(server: ScriptedServer, answer: Answer, fact: str, advice: str) -> None:
    (finding,) = _found(server.script("bad", answer))
    assert finding.kind == "problem"
    assert fact in finding.fact
    assert advice in finding.advice


@pytest.mark.parametrize(
    ("url", "fact", "advice"),
    [
        (free_address(), "No connection", "Start the service"),
        ("http://no-such-host.invalid/", "No connection", "check host, port"),
        ("localhost:8000", "is not an address", "Expected http://HOST:PORT/PATH"),
    ],
)
def test_address_without_a_service_is_a_problem(url: str, fact: str, advice: str) -> None:
    (finding,) = _found(url)
    assert (finding.kind, fact in finding.fact, advice in finding.advice) == ("problem", True, True), finding


def test_late_answer_is_reported_with_the_limit(server: ScriptedServer) -> None:
    (finding,) = _found(server.script("late", Answer({"rewards": [1.0]}, delay_s=30.0)), timeout_s=0.1)
    assert finding.fact == "No answer within 0.1 s."


def test_answer_that_never_ends_is_reported() -> None:
    def speak() -> None:
        peer, _ = listener.accept()
        with peer, suppress(OSError):
            peer.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n")
            while not over.wait(0.01):
                peer.sendall(b" ")

    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        speaker = threading.Thread(target=speak)
        speaker.start()
        (finding,) = _found(f"http://127.0.0.1:{listener.getsockname()[1]}/", timeout_s=0.3)
        over.set()
        speaker.join()
    assert finding.fact == "No answer within 0.3 s."


def _sum(received: Received) -> Any:
    return Answer({"rewards": [sum(_rewards(received))]})


def _turned(received: Received) -> Any:
    return Answer({"rewards": sorted(_rewards(received))})


def _rounded(received: Received) -> Any:
    rewards = _rewards(received)
    return Answer({"rewards": [reward + 0.004 * (len(rewards) - 1) for reward in rewards]})


def test_rewards_of_a_model_that_round_in_a_batch_are_not_called_mixed(server: ScriptedServer) -> None:
    found = _found(server.script_by("rounded", _rounded))
    assert [finding.kind for finding in found] == ["ok", "ok"]


def _constant(received: Received) -> Any:
    return Answer({"rewards": [0.5] * len(received.body["query"])})


@pytest.mark.parametrize(
    ("answer", "fact"),
    [
        (_sum, "Two samples in one request fail: In the reply $.rewards has 1 entries, expected 2"),
        (_turned, "Alone two samples got 1 and 0, in one request 0 and 1."),
        (_constant, "Two different samples both got 0.5."),
    ],
)
def test_endpoint_without_batches_is_a_warning(
    server: ScriptedServer, answer: Callable[[Received], Answer], fact: str
) -> None:
    found = _found(server.script_by("odd", answer))
    assert [finding.kind for finding in found if finding.fact.startswith(fact)] == ["warning"]
    assert "problem" not in [finding.kind for finding in found]


def test_right_response_of_the_users_that_gets_0_is_a_problem(server: ScriptedServer, tmp_path: Path) -> None:
    (tmp_path / "row.json").write_text('{"prompt": "1+1? ", "response": "\\\\boxed{2}", "label": "2"}\n')
    url = server.script_by("blind", lambda received: Answer({"rewards": [0.0] * len(received.body["query"])}))
    checked = run_module("rewards.check", url, "--sample", str(tmp_path / "row.json"))
    assert "problem  Your right response got 0, as a wrong one did." in checked.stdout
    assert checked.returncode == 1


def test_part_of_a_reply_that_a_run_does_not_use_is_a_warning(server: ScriptedServer) -> None:
    def answer(received: Received) -> Answer:
        rewards = _rewards(received)
        logs = {"right": rewards, "long": [1.0] * 5, "text": "yes", "one": 1.0}
        return Answer({"rewards": rewards, "scores": [10 * reward for reward in rewards], "extra_logs": logs})

    logs, scores = _found(server.script_by("parts", answer))[2:]
    assert (logs.kind, scores.kind) == ("warning", "warning")
    assert logs.fact.startswith("extra_logs has no number for long, text: ")
    assert scores.fact.startswith("scores has 10, ")


def test_random_rewards_are_a_warning(server: ScriptedServer) -> None:
    url = server.script("chance", *[Answer({"rewards": [number / 10]}) for number in range(4)])
    assert "One sample got 0, then 0.2." in [finding.fact for finding in _found(url)]


def test_sample_of_the_users_is_sent_with_its_columns(server: ScriptedServer, tmp_path: Path) -> None:
    (tmp_path / "row.json").write_text('{"prompt": "p ", "response": "r", "label": [1], "columns": {"a": 2}}\n')
    url = server.script_by("own", lambda received: Answer({"rewards": [1.0] * len(received.body["query"])}))
    run_module("rewards.check", url, "--sample", str(tmp_path / "row.json"), "--header", "X-Key: v")
    first = server.received["own"][0]
    row = {"prompts": ["p "], "labels": [[1]], "columns": [{"a": 2}]}
    assert first.body == {"query": ["p r"], "responses": ["r"], "num_turns": [1], **row}
    assert first.headers["x-key"] == "v"


def test_sample_is_the_first_line_of_a_file_of_rows(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('\ufeff{"prompt": "a\u2028b"}\r\n{"prompt": "c"}\n', encoding="utf-8")
    assert read_samples(tmp_path / "rows.jsonl")[0].prompt == "a\u2028b"


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("{}", "missing 1 required positional argument: 'prompt'"),
        ('{"prompt": [{"role": "user", "content": "p"}]}', "prompt and response must be text"),
        ('{"prompt": "p", "columns": [1]}', "columns must be an object"),
    ],
)
def test_invalid_sample_is_rejected(row: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "row.json").write_text(f"{row}\n")
    with pytest.raises(OperatorError, match="is not a sample") as refusal:
        read_samples(tmp_path / "row.json")
    assert problem in str(refusal.value)


@pytest.mark.parametrize("header", ["X-Key", ": v", "X-Key: \u00e9", "X-Key: a\nb"])
def test_invalid_header_is_rejected(header: str) -> None:
    with pytest.raises(OperatorError, match="is not a header"):
        read_headers([header], None)


@pytest.mark.parametrize("limit", ["0", "-1", "nan", "inf"])
def test_invalid_time_limit_is_rejected(limit: str) -> None:
    with pytest.raises(ArgumentTypeError, match="is not a time limit"):
        _seconds(limit)


@pytest.mark.parametrize(
    ("url", "port"), [("http://host/p", 80), ("https://host/p", 443), ("https://host:8443/p", 8443)]
)
def test_listener_has_the_port_of_the_url_or_of_its_scheme(url: str, port: int) -> None:
    assert listener_of(url) == ("host", port)


def test_function_with_labels_of_another_form_asks_for_a_row(tmp_path: Path) -> None:
    """As Search-R1's and verl's, whose labels have a target, or whose rows have columns."""
    code = "def score(solution_str, ground_truth):\n    return float(ground_truth['target'][0] in solution_str)\n"
    (tmp_path / "em.py").write_text(code)
    row = {"prompt": "1+1?", "response": "2", "label": {"target": ["2"]}}
    (tmp_path / "row.jsonl").write_text(json.dumps(row))
    with serving(RewardService(load_scorer(str(tmp_path / "em.py")), "em").app()) as address:
        built_in = run_module("rewards.check", address)
        own = run_module("rewards.check", address, "--sample", str(tmp_path / "row.jsonl"))
    assert built_in.returncode == 1
    assert "If your rows have others, give one with --sample.\n" in built_in.stdout
    assert built_in.stdout.endswith(" perhaps cannot be used by a run.\n")
    assert (own.returncode, own.stdout.splitlines()[-1]) == (0, f"{address} can be used by a run.")
