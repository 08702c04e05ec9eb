"""Calls of pushes that arrive late, in another order, or go on when the learner has given them up."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

from protocol.errors import NeighbourError
from protocol.weights.controls import Attempt
from rollout.attempt_fence import AttemptFence
from rollout.engine.version_gate import VersionGate
from rollout.server import RolloutServer
from tests.fakes.engines import ScriptedEngine
from tests.rollout.server_stage import ENGINE, Stage, attempt, push

Call = Callable[[RolloutServer, Attempt], Awaitable[Any]]

BEGIN: dict[str, Call] = {
    "join_weights": lambda server, by: server.join_weights(by, {"key": by[1]}, 1.0),
    "prepare": lambda server, by: server.prepare(by, {"key": by[1]}),
}
GO_ON: dict[str, Call] = {
    "receive": lambda server, by: server.receive(by),
    "commit": lambda server, by: server.commit(by, 3, "digest"),
    "probe": lambda server, by: server.probe(by, [1, 2]),
    "serve": lambda server, by: server.serve(by, 3),
    "leave": lambda server, by: server.leave(by),
}
VERBS = BEGIN | GO_ON


class SlowEngine(ScriptedEngine):
    """Each call waits, once it has begun, until `let_go` names it. ended: calls that were not broken off."""

    def __init__(self) -> None:
        super().__init__(lambda context: "<answer> 4</answer>", version=2)
        self.begun: list[str] = []
        self.ended: list[str] = []
        self.is_slow_at: set[str] = set()

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in ("join_weights", "prepare", "receive", "commit", "probe", "leave"):
            return found

        async def call(*arguments: Any) -> Any:
            self.begun.append(name)
            if name in self.is_slow_at:
                self.is_slow_at.remove(name)
                await asyncio.Event().wait()
            answer = await found(*arguments)
            self.ended.append(name)
            return answer

        return call


@pytest.fixture
def engine() -> SlowEngine:
    return SlowEngine()


@pytest.fixture
async def server(engine: SlowEngine) -> RolloutServer:
    async def start(_: object) -> SlowEngine:
        return engine

    server = RolloutServer("server", ENGINE, start)
    server._engine = engine
    return server


@pytest.mark.parametrize("verb", VERBS)
async def test_call_of_an_earlier_attempt_is_refused_and_changes_nothing(
    server: RolloutServer, engine: SlowEngine, verb: str
) -> None:
    old, new = attempt(), attempt()
    await server.join_weights(new, {}, 1.0)
    before = list(engine.begun)
    with pytest.raises(NeighbourError, match=rf"^server: attempt {old[1]} of the learner is over: attempt {new[1]} "):
        await VERBS[verb](server, old)

    assert engine.begun == before
    assert engine.policy_version == 2


@pytest.mark.parametrize("verb", BEGIN)
async def test_attempt_begins_once(server: RolloutServer, engine: SlowEngine, verb: str) -> None:
    await BEGIN[verb](server, by := attempt())
    with pytest.raises(NeighbourError, match=rf"^server: attempt {by[1]} of the learner is over"):
        await BEGIN[verb](server, by)

    assert engine.ended == [verb]


@pytest.mark.parametrize("verb", GO_ON)
async def test_call_that_goes_on_before_its_attempt_has_begun_is_refused(server: RolloutServer, verb: str) -> None:
    await server.join_weights(attempt(), {}, 1.0)
    with pytest.raises(NeighbourError, match=r"^server: attempt \d+ of the learner has not begun"):
        await GO_ON[verb](server, attempt())


@pytest.mark.parametrize("newer", BEGIN)
@pytest.mark.parametrize("verb", sorted({*VERBS} - {"serve"}))
async def test_newer_attempt_ends_what_runs_of_an_earlier_one_before_it_begins(
    server: RolloutServer, engine: SlowEngine, verb: str, newer: str
) -> None:
    by = attempt()
    if verb in GO_ON:
        await server.prepare(by, {})
    engine.is_slow_at = {verb}
    late = asyncio.ensure_future(VERBS[verb](server, by))
    while engine.is_slow_at:
        await asyncio.sleep(0)
    engine.begun.clear()
    engine.ended.clear()
    await BEGIN[newer](server, attempt())
    with pytest.raises(NeighbourError, match=rf"^server: attempt {by[1]} of the learner is over"):
        await late

    assert engine.begun == engine.ended == [newer]


async def test_two_attempts_that_come_while_an_earlier_one_ends_leave_the_newer(
    server: RolloutServer, engine: SlowEngine
) -> None:
    engine.is_slow_at = {"join_weights"}
    joins = [asyncio.ensure_future(server.join_weights(attempt(), {}, 1.0))]
    while engine.is_slow_at:
        await asyncio.sleep(0)
    joins += [asyncio.ensure_future(server.join_weights(attempt(), {}, 1.0)) for _ in range(2)]
    outcomes = await asyncio.gather(*joins, return_exceptions=True)

    assert [type(outcome).__name__ for outcome in outcomes] == ["NeighbourError", "NeighbourError", "NoneType"]
    assert engine.ended == ["join_weights"]


async def test_weights_whose_commit_was_broken_off_are_disowned(server: RolloutServer, engine: SlowEngine) -> None:
    await server.prepare(by := attempt(), {})
    engine.is_slow_at = {"commit"}
    late = asyncio.ensure_future(server.commit(by, 3, "digest"))
    while engine.is_slow_at:
        await asyncio.sleep(0)
    gate: VersionGate = server._gate
    await server.join_weights(attempt(), {}, 1.0)
    await asyncio.gather(late, return_exceptions=True)

    assert gate.num_invalidated == 1
    assert "forget_weights" in engine.calls


async def test_who_asks_no_more_leaves_nothing_running(server: RolloutServer, engine: SlowEngine) -> None:
    engine.is_slow_at = {"prepare"}
    call = asyncio.ensure_future(server.prepare(attempt(), {}))
    while engine.is_slow_at:
        await asyncio.sleep(0)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await asyncio.sleep(0)

    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_attempt_waits_for_a_call_that_ends_slowly_after_its_caller_was_cancelled() -> None:
    fence, ended = AttemptFence("server"), asyncio.Event()

    async def slow() -> None:
        for _ in range(2):
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
        ended.set()

    call = asyncio.ensure_future(fence.begin(attempt(), slow))
    await asyncio.sleep(0.01)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await fence.begin(attempt(), lambda: asyncio.sleep(0))
    assert ended.is_set()


@pytest.mark.parametrize("verb", VERBS)
async def test_call_of_another_learner_than_the_attached_runs_is_refused(stage: Stage, verb: str) -> None:
    await stage.server.attach(stage.run(incarnation=2))
    with pytest.raises(NeighbourError, match=r"^sluice-rollout-0: serves learner run/2, not run/1$"):
        await VERBS[verb](stage.server, attempt(incarnation=1))


async def test_attempts_of_the_next_learner_begin_anew(stage: Stage) -> None:
    await stage.server.attach(stage.run())
    await push(stage.server, 1, by=("run/1", 1000))
    await stage.server.attach(stage.run(incarnation=2))
    with pytest.raises(NeighbourError, match="serves learner run/2, not run/1"):
        await stage.server.prepare(("run/1", 1001), {})
    await push(stage.server, 2, by=("run/2", 1))

    assert (await stage.server.describe())["policy_version"] == 2
