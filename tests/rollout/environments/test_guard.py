"""What an environment may return, raise and do to itself: at most its own sample fails, with the reason."""

import asyncio
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from protocol.errors import NeighbourError
from rollout.environments.base import Observation, Resources, Step, Task, Turn
from rollout.environments.guard import GuardedEnvironment
from tests.fakes.engines import ScriptedEngine
from tests.rollout.episodes.played import SAMPLE, make_player

TASK = Task("Q?", "A", {})
TURN = Turn("text", "stop")


class Scripted:
    """Resets and steps as it is told: with a value, or by what a function returns or raises."""

    stop: Any = ()

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    async def reset(self, task: Task) -> Any:
        return await self._given()

    async def step(self, turn: Turn) -> Any:
        return await self._given()

    async def _given(self) -> Any:
        given = self._answer() if callable(self._answer) else self._answer
        return await given if asyncio.iscoroutine(given) else given


def _guarded(answer: Any, turn_timeout_s: float = 60.0) -> GuardedEnvironment:
    return GuardedEnvironment(lambda resources: Scripted(answer), Resources(1), turn_timeout_s)


async def test_numbers_without_a_name_are_left_out() -> None:
    """No message carries one: it would keep from the coordinator what other samples have to say."""
    step = await _guarded(Step(logs={"": 1.0, "\n": 2.0, "wins": 3.0})).step(TURN)
    assert step.logs == {"wins": 3.0}


class Closing(Scripted):
    """Counts its closing, and then does what it is told."""

    num_closed = 0

    async def close(self) -> None:
        self.num_closed += 1
        await self._given()


@pytest.mark.parametrize("play", ["end", "step fails", "reset fails"])
async def test_environment_is_closed_once_however_its_conversation_ends(play: str) -> None:
    def answer() -> Any:
        number = next(numbers)
        if number == (1 if play == "step fails" else 0 if play == "reset fails" else -1):
            raise RuntimeError("no")
        return "Q?" if number == 0 else Step(is_done=True)

    numbers = iter(range(9))
    environment = Closing(answer)
    player = make_player(ScriptedEngine(lambda context: "A"), lambda resources: environment)
    if play == "end":
        await player.play(SAMPLE)
    else:
        with pytest.raises(NeighbourError, match="RuntimeError: no"):
            await player.play(SAMPLE)
    assert environment.num_closed == 1


async def test_closing_that_fails_fails_nothing() -> None:
    def fail() -> Any:
        raise SystemExit(3)

    environment = Closing(fail)
    await GuardedEnvironment(lambda resources: environment, Resources(1), 5.0).close()
    assert environment.num_closed == 1


class NoRepr:
    def __repr__(self) -> str:
        raise RuntimeError("no")

    __str__ = __repr__


class NoText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        (None, "reset returned None (NoneType), expected text, or a list of chat messages with role and content"),
        ([], "reset returned [] (list), expected"),
        ({"role": "user"}, "reset returned {'role': 'user'} (dict), expected"),
        (["hello"], "reset returned ['hello'] (list), expected"),
        ([{"role": 3, "content": "x"}], "reset returned [{'role': 3, 'content': 'x'}] (list), expected"),
        (NoRepr(), "reset returned ? (NoRepr), expected"),
        ("x" * ((1 << 20) + 1), "reset returned a prompt has 1048577 characters, at most 1048576"),
        ([{"role": "user", "content": "x"}] * 1025, "reset returned 1025 messages, at most 1024"),
    ],
)
async def test_prompt_that_is_no_prompt_fails_the_sample(prompt: Any, problem: str) -> None:
    with pytest.raises(NeighbourError, match="^environment: " + re.escape(problem)):
        await _guarded(prompt).reset(TASK)


@pytest.mark.parametrize(
    ("step", "problem"),
    [
        (None, "step returned None (NoneType), expected a rollout.environments.base.Step"),
        ({"is_done": True}, "step returned {'is_done': True} (dict), expected"),
        (Step({"text": "more"}), "the step's observation is {'text': 'more'} (dict), expected text, an Observation"),  # type: ignore[arg-type]
        (Step(Observation(b"x")), "the observation's body is b'x' (bytes), expected text"),  # type: ignore[arg-type]
        (Step(Observation("x", head=None)), "the observation's head is None (NoneType), expected text"),  # type: ignore[arg-type]
        (Step("x" * ((1 << 20) + 1)), "the observation's body has 1048577 characters, at most 1048576"),
        (Step(is_done="False"), "the step's is_done is 'False' (str), expected True or False"),  # type: ignore[arg-type]
        (Step(is_done=lambda: False), "the step's is_done is <function"),  # type: ignore[arg-type]
        (
            Step(is_done=True, finish="won"),  # type: ignore[arg-type]
            "the step's finish is 'won' (str), expected None or one of answer, stop, length, turns",
        ),
        (Step(reward="1.0"), "the step's reward is '1.0' (str), expected a number"),  # type: ignore[arg-type]
        (Step(reward=float("inf")), "gave the reward inf"),
        (Step(reward=10**400), "OverflowError: int too large to convert to float"),
        (Step(reward=np.array([1.0, 2.0])), "ValueError: can only convert an array of size 1"),  # type: ignore[arg-type]
        (Step(is_done=np.array([True, False])), "its answer cannot be read: ValueError: can only convert"),  # type: ignore[arg-type]
        (Step(finish=np.array(["answer", "stop"])), "its answer cannot be read: ValueError: The truth value"),  # type: ignore[arg-type]
    ],
)
async def test_step_that_is_no_step_fails_the_sample(step: Any, problem: str) -> None:
    with pytest.raises(NeighbourError, match="^environment: " + re.escape(problem)):
        await _guarded(step).step(TURN)


class BrokenMessage(dict[str, str]):
    def get(self, key: str, default: Any = None) -> Any:
        raise SystemExit(3)


async def test_prompt_of_a_class_that_cannot_be_read_fails_the_sample() -> None:
    with pytest.raises(NeighbourError, match=r"^environment: its answer cannot be read: SystemExit: 3"):
        await _guarded([BrokenMessage(role="user")]).reset(TASK)


@pytest.mark.parametrize(
    "reward", [1, True, 1.0, np.float32(1), np.int64(1), np.bool_(True), np.array(1.0), np.array([1.0])]
)
async def test_reward_may_be_any_kind_of_number(reward: Any) -> None:
    step = await _guarded(Step(is_done=True, reward=reward)).step(TURN)
    assert (step.reward, type(step.reward)) == (1.0, float)


@pytest.mark.parametrize("is_done", [True, 1, np.bool_(True), np.array([True])])
async def test_end_may_be_any_kind_of_flag(is_done: Any) -> None:
    assert (await _guarded(Step(is_done=is_done)).step(TURN)).is_done is True


async def test_text_of_an_observation_is_its_body() -> None:
    assert (await _guarded(Step("more")).step(TURN)).observation == Observation("more")


def _raising(error: BaseException) -> Callable[[], Any]:
    def call() -> Any:
        raise error

    return call


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (KeyError("board"), "KeyError: 'board'"),
        (SystemExit(3), "SystemExit: 3"),
        (KeyboardInterrupt(), "KeyboardInterrupt: "),
        (GeneratorExit(), "GeneratorExit: "),
        (RecursionError("too deep"), "RecursionError: too deep"),
        (TimeoutError("its own"), "TimeoutError: its own"),
        (NoText(), "NoText: <NoText without a text>"),
        (ValueError("two\nlines"), "ValueError: two lines"),
    ],
)
async def test_what_an_environment_raises_is_told_with_its_place(error: BaseException, problem: str) -> None:
    with pytest.raises(NeighbourError) as caught:
        await _guarded(_raising(error)).step(TURN)
    assert re.fullmatch(rf"environment: {re.escape(problem)} \({__file__}:\d+\)", str(caught.value))
    assert str(caught.value).endswith(f" ({caught.value.place})")
    assert caught.value.__cause__ is error


async def test_failure_of_a_search_passes_as_it_is() -> None:
    failure = NeighbourError("retriever", "down")
    with pytest.raises(NeighbourError) as caught:
        await _guarded(_raising(failure)).step(TURN)
    assert caught.value is failure


@pytest.mark.parametrize("make", [lambda: _raising(SystemExit("in the constructor")), lambda: _raising(OSError("x"))])
async def test_environment_that_cannot_be_made_fails_the_sample(make: Callable[[], Callable[[], Any]]) -> None:
    with pytest.raises(NeighbourError, match=r"^environment: (SystemExit|OSError): "):
        GuardedEnvironment(lambda resources: make()(), Resources(1), 5.0)


@pytest.mark.parametrize("stop", [None, (1,), ("",), "</answer>"])
async def test_stop_strings_are_strings(stop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scripted, "stop", stop)
    with pytest.raises(NeighbourError, match=r"^environment: its `stop` .* expected a tuple of strings$"):
        _guarded("Q?")


async def test_environment_that_cancels_itself_fails_its_sample_alone() -> None:
    def cancel() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()

    async def wait() -> None:
        cancel()
        await asyncio.sleep(1.0)

    with pytest.raises(NeighbourError, match=r"^environment: no observation: it cancelled itself$"):
        await _guarded(wait).step(TURN)


async def _deaf(until: asyncio.Event) -> Step:
    """Catch every cancelling."""
    while not until.is_set():
        try:
            await until.wait()
        except asyncio.CancelledError:
            continue
    return Step()


async def test_environment_that_catches_its_cancelling_holds_nobody_up() -> None:
    until = asyncio.Event()
    with pytest.raises(NeighbourError, match=r"^environment: no observation within rollout.turn_timeout_s = 0.05 s$"):
        await _guarded(lambda: _deaf(until), turn_timeout_s=0.05).step(TURN)

    step = asyncio.create_task(_guarded(lambda: _deaf(until)).step(TURN))
    await asyncio.sleep(0.02)
    step.cancel()
    await asyncio.wait([step], timeout=20.0)
    assert step.cancelled()
    until.set()
    await asyncio.sleep(0.01)


async def test_environment_that_is_cancelled_has_left_before_its_sample_has() -> None:
    left = []

    async def leaving() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.02)
            left.append("left")

    step = asyncio.create_task(_guarded(leaving).step(TURN))
    await asyncio.sleep(0.02)
    step.cancel()
    await asyncio.wait([step])
    assert left == ["left"]


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("is_late", [False, True])
async def test_task_of_an_environment_that_would_end_the_event_loop_fails_its_sample(
    kind: type[BaseException], is_late: bool
) -> None:
    async def leave() -> None:
        try:
            await asyncio.sleep(0)
        finally:
            raise kind("out")

    async def start() -> None:
        task = asyncio.create_task(leave())
        if is_late:
            await asyncio.sleep(0)
            task.cancel()
        await asyncio.gather(task)

    with pytest.raises(NeighbourError, match=f"^environment: RuntimeError: a task raised {kind.__name__}: out"):
        await _guarded(lambda: start()).step(TURN)


async def test_task_of_an_environment_is_cancelled_before_its_first_step_as_any_other() -> None:
    async def start() -> Step:
        task = asyncio.create_task(asyncio.sleep(60.0))
        task.cancel()
        await asyncio.wait([task])
        return Step(is_done=task.cancelled())

    assert (await _guarded(lambda: start()).step(TURN)).is_done
