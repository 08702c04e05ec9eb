"""One row, environment or reply fails its own sample with the reason, and no other."""

import asyncio
import logging
from datetime import UTC, datetime
from typing import Any

import pytest

from protocol.errors import NeighbourError
from protocol.settings.rewards import RewardEndpoint
from protocol.wire import messages as m
from protocol.wire.trajectory import Trajectory
from rollout.environments.base import SingleTurn, Step, Task, Turn
from rollout.neighbours.reward_client import RewardClient, Score, ScoreRequest
from tests.fakes.engines import ScriptedEngine
from tests.fakes.http_servers import Answer, scripted_server
from tests.fakes.playing_session import playing_session
from tests.fakes.rollout_fakes import ScriptedScorer


def _engine() -> ScriptedEngine:
    return ScriptedEngine(lambda context: "4")


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize(
    ("label", "problem"),
    [
        (float("nan"), "nan cannot be sent to a reward service: Out of range float values are not JSON compliant"),
        ([1.0, float("-inf")], "[1.0, -inf] cannot be sent to a reward service: Out of range float values"),
        (b"\0\1", r"b'\x00\x01' cannot be sent to a reward service: JSON has no bytes"),
        ({b"key": 1}, "{b'key': 1} cannot be sent to a reward service: keys must be str"),
    ],
)
async def test_label_that_json_cannot_represent_fails_its_own_sample(label: Any, problem: str, batch_size: int) -> None:
    with scripted_server() as server:
        url = server.script_by("score", lambda received: Answer({"rewards": [0.5] * len(received.body["query"])}))
        endpoint = RewardEndpoint.model_validate({"name": "mine", "url": url, "batch_size": batch_size})
        async with RewardClient([endpoint], "sum") as rewards, playing_session(_engine(), scorer=rewards) as playing:
            bystander = asyncio.create_task(playing.made("e0-good"))
            failed = await playing.made("e0-bad", label=label)
            assert isinstance(failed, m.SampleFailed)
            assert (failed.boundary, failed.num_model_tokens) == ("prompt", 1)
            assert failed.detail.startswith(f"its label {problem}")
            del bystander  # its message may have arrived before the failed one
            good = await playing.made("e0-next")
            assert isinstance(good, Trajectory)
            assert good.facts.reward == 0.5
            assert playing.session.failures.totals == {"prompt": 1}


async def test_dates_are_sent_as_text_and_columns_as_valid_json() -> None:
    when = datetime(2024, 1, 2, tzinfo=UTC)
    columns = {"when": when, "missing": float("nan"), "far": float("inf"), "blob": b"\0", "tags": ["a", b"\0"]}
    with scripted_server() as server:
        url = server.script("score", Answer({"rewards": [0.5]}))
        endpoint = RewardEndpoint.model_validate({"name": "mine", "url": url})
        async with RewardClient([endpoint], "sum") as rewards, playing_session(_engine(), scorer=rewards) as playing:
            made = await playing.made("e0-a", label=when, columns=columns)
        assert isinstance(made, Trajectory)
        (received,) = server.received["score"]
        assert received.body["labels"] == ["2024-01-02T00:00:00+00:00"]
        assert received.body["columns"] == [
            {"when": "2024-01-02T00:00:00+00:00", "missing": None, "tags": ["a", None]},
        ]


class ManyParts(ScriptedScorer):
    async def score(self, request: ScoreRequest) -> Score:
        return Score(1.0, {f"part{i}": 1.0 for i in range(65)})


async def test_invalid_facts_fail_the_sample() -> None:
    async with playing_session(_engine(), scorer=ManyParts()) as playing:
        failed = await playing.made("e0-a")
        assert isinstance(failed, m.SampleFailed)
        assert failed.boundary == "trajectory"
        assert failed.detail.endswith("Expected `object` of length <= 64 - at `$.reward_parts`")


class Breaking(ScriptedScorer):
    """Raises an error that is not a neighbour's failure."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    async def score(self, request: ScoreRequest) -> Score:
        if request.label == "break":
            raise self.error
        return await super().score(request)


@pytest.mark.parametrize(
    "error", [AttributeError("no such thing"), SystemExit(1), GeneratorExit(2), asyncio.CancelledError("theirs")]
)
async def test_error_of_any_kind_fails_its_sample_and_is_logged(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        async with playing_session(_engine(), scorer=Breaking(error)) as playing:
            failed = await playing.made("e0-a", label="break")
            assert isinstance(failed, m.SampleFailed)
            assert failed.boundary == "sample"
            assert failed.detail.startswith(f"{type(error).__name__}: {error} ({__file__}:")
            assert failed.num_model_tokens == 1
            assert isinstance(await playing.made("e0-b"), Trajectory)
            assert not playing.task.done()
    (record,) = caplog.records
    assert record.exc_info is not None
    assert record.exc_info[1] is error


async def test_failure_text_is_one_valid_line(caplog: pytest.LogCaptureFixture) -> None:
    scorer = ScriptedScorer(NeighbourError("", "down\n14:07 INFO all is well \ud800\x1b[2J" + "x" * 9000))
    with caplog.at_level(logging.WARNING):
        async with playing_session(_engine(), scorer=scorer) as playing:
            failed = await playing.made("e0-a")
    assert isinstance(failed, m.SampleFailed)
    assert (failed.boundary, len(failed.detail)) == ("unnamed", 2000)
    assert failed.detail.startswith("down 14:07 INFO all is well ? [2Jxxx")
    assert "\n" not in caplog.records[0].getMessage()


class Renaming(SingleTurn):
    """Fails under a new name each time."""

    async def step(self, turn: Turn) -> Step:
        raise NeighbourError(f"boundary {id(self)} {turn.text}", "down")


async def test_heartbeat_holds_a_limited_number_of_failure_names() -> None:
    names = iter(range(1000))
    engine = ScriptedEngine(lambda context: f"{next(names)}")
    async with playing_session(engine, Renaming, max_groups_in_flight=300) as playing:
        playing.coordinator.lease("e0-a", sample_indices=list(range(300)))
        for _ in range(300):
            await playing.coordinator.next(m.SampleFailed)
        playing.coordinator.received.clear()
        while sum((beat := await playing.coordinator.next(m.Heartbeat)).failures.values()) < 300:
            pass
    assert (len(beat.failures), beat.failures["others"]) == (251, 50)


class Rewriting(SingleTurn):
    """Changes its row."""

    async def reset(self, task: Task) -> Any:
        assert isinstance(task.prompt, list)
        task.prompt.append({"role": "user", "content": task.columns["list"].pop()})
        return task.prompt


async def test_environment_that_changes_its_row_does_not_affect_other_samples() -> None:
    async with playing_session(_engine(), Rewriting) as playing:
        prompt = [{"role": "user", "content": "a"}]
        playing.coordinator.lease("e0-a", num_samples=3, prompt=prompt, columns={"list": ["b"]})
        for _ in range(3):
            done = await playing.coordinator.next(m.TrajectoryDone)
            trajectory = Trajectory.from_buffers(done.facts, playing.coordinator.buffers[-1])
            assert "".join(map(chr, trajectory.tokens)) == "[user]a[user]b[assistant]4"
