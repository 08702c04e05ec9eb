"""Bodies of the reward and retrieve contracts: what is accepted, and the words for what is not."""

import json
from typing import Any

import pytest

from protocol.http.bodies import (
    BodyError,
    Passage,
    RetrieveRequest,
    RewardRequest,
    SampleScore,
    read_passages,
    read_request,
    read_scores,
)


@pytest.mark.parametrize("body", [b'{"rewards": [0.5]}', b'{"rewards": 0.5}', b"[0.5]", b"0.5"])
def test_read_scores_accepts_four_shapes_for_one_sample(body: bytes) -> None:
    assert tuple(each.reward for each in read_scores(body, 1)) == (0.5,)


def test_read_scores_keeps_order_and_ignores_other_keys() -> None:
    body = b'{"rewards": [1, -2.5, 0], "scores": [1, 0, 0], "extra_logs": {"a": NaN}}'
    assert tuple(each.reward for each in read_scores(body, 3)) == (1.0, -2.5, 0.0)


@pytest.mark.parametrize(
    ("body", "num_samples", "message"),
    [
        (b'{"rewards": [1, NaN]}', 2, "$.rewards[1] is nan, expected a finite number"),
        (b'{"rewards": [-1e19]}', 1, "$.rewards[0] is -1e+19, expected at most 1e+18 either way"),
        (b'{"rewards": [-Infinity]}', 1, "$.rewards[0] is -inf, expected a finite number"),
        (b'{"rewards": [1' + b"0" * 400 + b"]}", 1, "$.rewards[0] is inf, expected a finite number"),
        (b'{"rewards": [1, null]}', 2, "$.rewards[1] is None, expected a number"),
        (b'{"rewards": ["1.0"]}', 1, "$.rewards[0] is '1.0', expected a number"),
        (b'{"rewards": [true]}', 1, "$.rewards[0] is True, expected a number"),
        (b'{"rewards": [1]}', 2, "$.rewards has 1 entries, expected 2 (one per sample)"),
        (b'{"rewards": []}', 1, "$.rewards has 0 entries, expected 1 (one per sample)"),
        (b'{"rewards": 1}', 2, "$.rewards is 1, expected a list"),
        (b"0.5", 2, "$ is 0.5, expected a list"),
        (b'{"reward": [1]}', 1, "$.rewards is missing; the reply has the keys ['reward']"),
        (b"null", 1, "$ is None, expected a number"),
        (b"<html>", 1, "$ is not JSON (expected value at line 1 column 1): '<html>'"),
    ],
)
def test_read_scores_names_what_is_wrong(body: bytes, num_samples: int, message: str) -> None:
    with pytest.raises(BodyError) as error:
        read_scores(body, num_samples)
    assert str(error.value) == message


def test_read_scores_refuses_json_of_any_depth() -> None:
    with pytest.raises(BodyError, match=r"^\$ is not JSON \(recursion limit exceeded"):
        read_scores(b"[" * 1_000_000, 1)


def test_read_passages_accepts_documents_with_and_without_scores_and_plain_strings() -> None:
    body = b"""{"result": [
        [{"document": {"id": "7", "contents": "a"}, "score": 1.5}, {"document": "b", "score": 1}],
        [{"id": 8, "contents": "c"}, "d"],
        []]}"""
    assert read_passages(body, 3) == (
        (Passage("7", "a", 1.5), Passage("", "b", 1.0)),
        (Passage("8", "c", None), Passage("", "d", None)),
        (),
    )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"results": []}', "$.result is missing"),
        (b'{"result": []}', "$.result has 0 entries, expected 1 (one per query)"),
        (b'{"result": ["a"]}', "$.result[0] is 'a', expected a list"),
        (b'{"result": [[{"id": "1"}]]}', "$.result[0][0].contents is None, expected a string"),
        (b'{"result": [[{"document": {"id": "1"}}]]}', "$.result[0][0].document.contents is None, expected a string"),
        (
            b'{"result": [[{"document": "a", "score": NaN}]]}',
            "$.result[0][0].score is nan, expected a finite number",
        ),
        (b'{"result": [[3]]}', "$.result[0][0] is 3, expected a document"),
    ],
)
def test_read_passages_names_what_is_wrong(body: bytes, message: str) -> None:
    with pytest.raises(BodyError) as error:
        read_passages(body, 1)
    assert str(error.value) == message


def test_read_request_names_the_wrong_field() -> None:
    with pytest.raises(BodyError) as error:
        read_request(RetrieveRequest, b'{"queries": ["a", 3]}')
    assert (error.value.path, str(error.value)) == (
        "$.queries[1]",
        "$.queries[1] Input should be a valid string, got 3",
    )


def test_reward_request_refuses_lists_that_are_not_aligned() -> None:
    with pytest.raises(BodyError, match=r"labels has 1 entries, query has 2"):
        read_request(RewardRequest, b'{"query": ["a", "b"], "labels": [1]}')


def test_reward_request_of_an_older_client_has_no_labels() -> None:
    request = read_request(RewardRequest, b'{"query": ["a"]}')
    assert (request.query, request.prompts, request.labels) == (["a"], None, None)


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ({"rewards": [1, 2]}, (SampleScore(1.0), SampleScore(2.0))),
        ({"rewards": [1, 2], "scores": None, "extra_logs": None}, (SampleScore(1.0), SampleScore(2.0))),
        ({"rewards": [1, 2], "scores": [0.5, 0]}, (SampleScore(1.0, 0.5), SampleScore(2.0, 0.0))),
        (
            {"rewards": [1, 2], "extra_logs": {"a": [3, 4], "all": 5, "text": ["x", "y"], "short": [1], "odd": None}},
            (SampleScore(1.0, None, {"a": 3.0, "all": 5.0}), SampleScore(2.0, None, {"a": 4.0, "all": 5.0})),
        ),
        ({"rewards": [1, 2], "extra_logs": ["a"]}, (SampleScore(1.0), SampleScore(2.0))),
        ({"rewards": [1, 2], "extra_logs": {"a": [None, 4]}}, (SampleScore(1.0), SampleScore(2.0, None, {"a": 4.0}))),
    ],
)
def test_scored_has_what_a_service_gave_besides_rewards(reply: Any, expected: tuple[SampleScore, ...]) -> None:
    assert read_scores(json.dumps(reply).encode(), 2) == expected


@pytest.mark.parametrize(
    ("scores", "problem"),
    [([0.5], r"\$\.scores has 1 entries, expected 2"), ([0.5, None], r"\$\.scores\[1\] is None, expected a number")],
)
def test_scores_are_as_strict_as_rewards(scores: Any, problem: str) -> None:
    with pytest.raises(BodyError, match=problem):
        read_scores(json.dumps({"rewards": [1, 2], "scores": scores}).encode(), 2)
