"""Which environments another server can go on with, by what, and what a wrong snapshot does."""

from typing import Any

import pytest

from protocol.errors import NeighbourError
from protocol.settings.tools import ToolsSettings
from protocol.wire.conversation import MAX_SNAPSHOT_CHARACTERS
from rollout.environments.base import MakeEnvironment, Resources, SingleTurn, Step, Task, Turn
from rollout.environments.guard import GuardedEnvironment
from rollout.environments.search import Search
from rollout.environments.snapshots import is_resumable, resume_from, snapshot_of
from rollout.environments.tool_use.tool_use import MakeToolUse, SharedTools
from rollout.environments.verl.tools import VerlToolbox
from rollout.neighbours.node import Node
from rollout.neighbours.tools.calculator import Calculator
from tests.fakes.rollout_fakes import make_keys, make_spec
from tests.fakes.tool_models import FAMILIES

CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "12 * 12"}}</tool_call>'
HERMES = ToolsSettings(names=["calculator"], call_format="hermes")
TASK = Task("What is 12 * 12?", "144", {})


def _guarded(make: MakeEnvironment, max_turns: int = 2) -> GuardedEnvironment:
    return GuardedEnvironment(make, Resources(max_turns, tokenizer=FAMILIES["hermes"].tokenizer()), 60.0)


def _tools() -> MakeToolUse:
    calculator = Calculator(make_spec(), Node(None, None, "t", make_keys()))
    return MakeToolUse(HERMES, lambda resources: SharedTools([calculator]))


class Scripted:
    """Gives what it is told as its snapshot, and keeps what it is given."""

    stop: tuple[str, ...] = ()

    def __init__(self, snapshot: Any) -> None:
        self.given = snapshot

    async def reset(self, task: Task) -> str:
        return task.prompt if isinstance(task.prompt, str) else ""

    async def step(self, turn: Turn) -> Step:
        return Step()

    def snapshot(self) -> Any:
        return self.given() if callable(self.given) else self.given

    async def resume(self, snapshot: Any) -> None:
        self.given = snapshot


class OnlyByName(Scripted):
    """A user's class that has had such names before they meant anything."""

    resume: Any = "later"


async def test_tools_go_on_with_the_turns_and_calls_that_there_were() -> None:
    first = _guarded(_tools())
    await first.reset(TASK)
    await first.step(Turn(CALL + CALL, "stop"))
    assert snapshot_of(first) == '{"turns": 1, "calls": 2}'
    second = _guarded(_tools())
    await second.reset(TASK)
    await resume_from(second, snapshot_of(first) or "")
    step = await second.step(Turn(CALL, "stop"))
    assert isinstance(step.observation, list)
    assert step.observation[0]["tool_call_id"] == "call00002"
    assert (await second.step(Turn(CALL, "stop"))).finish == "turns"


async def test_tools_that_remember_a_conversation_are_not_gone_on_with() -> None:
    environment = _guarded(MakeToolUse(HERMES, lambda resources: VerlToolbox({}, "none")))
    await environment.reset(TASK)
    assert snapshot_of(environment) is None


class Counting(Search):
    """A user's class that keeps more than what it was made from knows to give away."""

    def __init__(self, resources: Resources) -> None:
        super().__init__(resources)
        self.found = 0


class Giving(Search):
    """Keeps more between turns, too."""

    async def step(self, turn: Turn) -> Step:
        return await super().step(turn)


class Named(Search):
    """Differs in nothing that is kept."""

    stop = ("</search>",)


class Whole(Counting):
    """Says itself what it keeps."""

    def snapshot(self) -> dict[str, int]:
        return {**super().snapshot(), "found": self.found}


@pytest.mark.parametrize(
    ("make", "can"),
    [
        (Search, True),
        (SingleTurn, False),
        (OnlyByName, False),
        (Counting, False),
        (Giving, False),
        (Named, True),
        (Whole, True),
    ],
)
def test_who_can_be_gone_on_with(make: Any, can: bool) -> None:
    environment = _guarded(make)
    assert is_resumable(make) == can
    assert (snapshot_of(environment) is not None) == can


async def test_what_a_users_environment_gives_is_what_its_next_object_gets() -> None:
    made: list[Scripted] = []

    def make(resources: Resources) -> Scripted:
        made.append(Scripted({"board": ["x", None], "moves": 3}))
        return made[-1]

    snapshot = snapshot_of(_guarded(make))
    assert snapshot is not None
    await resume_from(_guarded(make), snapshot)
    assert made[1].given == {"board": ["x", None], "moves": 3}


@pytest.mark.parametrize(
    ("snapshot", "problem"),
    [
        (object(), "TypeError: Object of type object is not JSON serializable"),
        (float("nan"), "ValueError: Out of range float values are not JSON compliant"),
        ("x" * MAX_SNAPSHOT_CHARACTERS, "its snapshot has 16386 characters of JSON, at most 16384"),
        (lambda: 1 / 0, "ZeroDivisionError: division by zero"),
        (
            {"seen": [{3: "x"}]},
            "its snapshot has the key 3 (int), which JSON would turn into a text. Use",
        ),
    ],
)
def test_a_snapshot_that_is_none_fails_its_sample(snapshot: Any, problem: str) -> None:
    with pytest.raises(NeighbourError) as failed:
        snapshot_of(_guarded(lambda resources: Scripted(snapshot)))
    assert failed.value.boundary == "environment"
    assert problem in failed.value.detail
