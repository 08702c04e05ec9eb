"""Agents that give up waiting for a turn: what they ask again for is theirs, what they never read is not trained."""

import asyncio
import itertools

import httpx

from tests.rollout.endpoint.agents_scene import MESSAGES, AgentsScene, taken


async def _leave(scene: AgentsScene, *asking: "asyncio.Task[httpx.Response]") -> None:
    """Have clients hang up whose requests the engine writes at; returns once the server has noticed."""
    async with asyncio.timeout(30.0):
        while len(scene.engine.asked) < len(asking):
            await asyncio.sleep(0.01)
        for each in asking:
            each.cancel()
        while f'status="499"}} {len(asking)}.0' not in (await scene.http.get("/metrics")).text:
            await asyncio.sleep(0.02)


async def test_draws_of_one_history_that_are_all_tried_again_are_different_ones() -> None:
    numbers = itertools.count()
    async with taken(lambda context: f"n{next(numbers)}<|im_end|>") as (scene, told, _):
        scene.engine.may_write.clear()
        await _leave(scene, *(asyncio.create_task(scene.ask(told)) for _ in range(3)))
        again = [asyncio.create_task(scene.ask(told, **{"X-Stainless-Retry-Count": "1"})) for _ in range(3)]
        scene.engine.may_write.set()
        assert len({(await each).json()["id"] for each in again}) == 3
        assert len(scene.engine.wrote) == 3


async def test_turn_that_its_agent_gave_up_is_not_what_is_trained() -> None:
    async with taken() as (scene, told, _):
        may_write = scene.engine.may_write
        may_write.clear()
        given_up = [{"role": "user", "content": "slow"}]
        await _leave(scene, asyncio.create_task(scene.ask(told, {"messages": given_up})))
        scene.engine.may_write = asyncio.Event()
        scene.engine.may_write.set()
        assert (await scene.ask(told)).status_code == 200
        may_write.set()
        async with asyncio.timeout(30.0):  # until it is written, and has been read
            while len(scene.engine.wrote) < 2:
                await asyncio.sleep(0.01)
        trajectory = await scene.rewarded(told)
    before, turn = scene.engine.wrote[0]
    assert trajectory.tokens.tolist() == before + turn


async def test_turn_that_was_sent_to_nobody_is_cut_off_the_conversation() -> None:
    async with taken() as (scene, told, _):
        first = await scene.ask(told)
        scene.engine.may_write.clear()
        more = [*MESSAGES, first.json()["choices"][0]["message"], {"role": "user", "content": "sure?"}]
        scene.engine.asked.clear()
        await _leave(scene, asyncio.create_task(scene.ask(told, {"messages": more})))
        scene.engine.may_write.set()
        async with asyncio.timeout(30.0):
            while len(scene.engine.wrote) < 2:
                await asyncio.sleep(0.01)
        trajectory = await scene.rewarded(told)
    before, turn = scene.engine.wrote[0]
    assert (trajectory.tokens.tolist(), trajectory.facts.num_turns) == (before + turn, 1)
