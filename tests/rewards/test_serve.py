"""The reward service over real HTTP, in a thread and as a process."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from protocol.http.bodies import read_scores
from rewards.bundled import scorer_named
from rewards.function_process import load_scorer
from rewards.service import RewardService
from tests.fakes.http_servers import module_serving, run_module, serving


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
    assert set(shown) == {"query", "responses", "prompts", "labels", "columns", "num_turns"}
    assert route["responses"]["200"]["content"]["application/json"]["schema"] == {
        "$ref": "#/components/schemas/RewardReply"
    }


def test_health_names_the_scorer_and_what_decides_its_scores(exact_match: httpx.Client) -> None:
    code = scorer_named("exact_match").digest
    assert exact_match.get("/health").json() == {"status": "ok", "scorer": "exact_match", "code": code}


def test_health_tells_another_function_of_the_same_file_and_another_form_of_its_call(tmp_path: Path) -> None:
    file = tmp_path / "f.py"
    file.write_text(
        "def strict(solution_str, ground_truth):\n    return 1.0 * (solution_str == ground_truth)\n"
        "def lenient(solution_str, ground_truth):\n    return 1.0 * (ground_truth in solution_str)\n"
    )
    codes = []
    for name, reads in (
        ("strict", "response"),
        ("strict", "response"),
        ("lenient", "response"),
        ("lenient", "sequence"),
    ):
        with serving(RewardService(load_scorer(f"{file}:{name}", reads=reads), "f.py").app()) as address:
            told = httpx.get(f"{address}/health", trust_env=False).json()
        assert told["is_edited"] is False
        codes.append(told["code"])
    assert codes[0] == codes[1]
    assert len(set(codes)) == 3


def test_metrics_count_samples(exact_match: httpx.Client) -> None:
    def count() -> float:
        lines = exact_match.get("/metrics").text.splitlines()
        return float(next(line for line in lines if line.startswith("sluice_reward_samples_total ")).split()[1])

    before = count()
    exact_match.post("/", json=body_of("a", "b", labels=["a", "b"]))
    assert count() == before + 2


def test_a_function_that_raises_gives_500_with_type_message_place_and_sample(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text("def score(s):\n    return 1 / len(s.label)\n")
    with serving(RewardService(load_scorer(str(tmp_path / "f.py")), "f.py").app()) as address:
        body = {"query": ["a", "b"], "labels": ["x", ""]}
        answer = httpx.post(address, json=body, headers={"idempotency-key": "p7/3"}, trust_env=False)
        place = f"{tmp_path}/f.py:2"
        assert answer.status_code == 500
        assert answer.json() == {
            "detail": f"the reward function failed on sample 1: ZeroDivisionError: division by zero ({place})",
            "type": "ZeroDivisionError",
            "message": "division by zero",
            "where": place,
            "sample": 1,
            "key": "p7/3",
        }


def test_logs_of_some_samples_are_null_for_the_others_and_scores_of_some_refused(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text(
        "from rewards.sample import Score\n"
        "def score(s):\n"
        "    return Score(1.0, s.label and 0.5, {'all': 2.0, **({'one': 3.0} if s.label else {})})\n"
    )
    with serving(RewardService(load_scorer(str(tmp_path / "f.py")), "f.py").app()) as address:
        answer = httpx.post(address, json={"query": ["a", "b"], "labels": [1, 0]}, trust_env=False)
        logs = {"all": [2.0, 2.0], "one": [3.0, None]}
        assert answer.json() == {"rewards": [1.0, 1.0], "scores": [0.5, 0.0], "extra_logs": logs}
        assert [score.logs for score in read_scores(answer.content, 2)] == [{"all": 2.0, "one": 3.0}, {"all": 2.0}]
        mixed = httpx.post(address, json={"query": ["a", "b"], "labels": [1, None]}, trust_env=False)
        assert (mixed.status_code, mixed.json()["sample"]) == (500, 1)


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
            "rewards: --function /nowhere.py is not a Python file. Expected FILE.py, FILE.py:NAME or MODULE:NAME.\n",
        ),
    ],
)
def test_serve_exits_1_with_one_sentence(arguments: tuple[str, str], message: str) -> None:
    finished = run_module("rewards.serve", *arguments, "--port", "0")
    assert (finished.returncode, finished.stdout, finished.stderr) == (1, "", message)


def test_code_without_isolation_on_a_public_host_requires_a_token() -> None:
    arguments = ("--scorer", "code_tests", "--unsafe-local-exec", "--host", "0.0.0.0", "--port", "0")  # noqa: S104
    finished = run_module("rewards.serve", *arguments)
    assert finished.returncode == 1
    assert finished.stderr.startswith("rewards: with --unsafe-local-exec on --host 0.0.0.0 other machines can run code")


@pytest.mark.parametrize("number", ["0", "-1", "two"])
def test_serve_refuses_a_number_of_workers_that_is_none(number: str) -> None:
    finished = run_module("rewards.serve", "--scorer", "exact_match", "--workers", number)
    assert finished.returncode == 2
    assert f"--workers: is {number}, expected a number of at least 1" in finished.stderr
