"""A session is told another set of reward endpoints: its demands say what it makes of it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from protocol.wire import messages as m
from tests.fakes.playing_session import PlayingSession, playing_session
from tests.fakes.rollout_fakes import ScriptedEngine, ScriptedScorer


class Sets:
    """Takes every set but number 3."""

    def __init__(self) -> None:
        self.number = 1
        self.problem: str | None = None
        self.shadow_misses = {"shadow:new": 4}

    def use(self, number: int, scoring: str) -> None:
        self.problem = "KEY is not set" if number == 3 else None
        if self.problem is None:
            self.number = number


@asynccontextmanager
async def told(number: int) -> AsyncIterator[PlayingSession]:
    async with playing_session(ScriptedEngine(lambda context: "4"), scorer=ScriptedScorer(), rewards=Sets()) as playing:
        await playing.coordinator.next(m.Demand, 30.0)
        playing.coordinator.send(m.Rewards(**playing.coordinator.stamp, reward_set=number, scoring="{}"))
        yield playing


async def demand_that(playing: PlayingSession, reward_set: int | None = None) -> m.Demand:
    async with asyncio.timeout(30.0):
        while True:
            demand = await playing.coordinator.next(m.Demand, 30.0)
            if reward_set in (None, demand.reward_set) and (reward_set or demand.reward_problem is not msgspec.UNSET):
                return demand


async def test_demands_name_the_set_that_scores_from_now_on() -> None:
    async with told(2) as playing:
        assert (await demand_that(playing, 2)).reward_problem is msgspec.UNSET


async def test_demands_say_why_a_set_cannot_be_used() -> None:
    async with told(3) as playing:
        demand = await demand_that(playing)
        assert (demand.reward_set, demand.reward_problem) == (msgspec.UNSET, "KEY is not set")


async def test_heartbeats_count_what_shadow_endpoints_missed() -> None:
    async with told(2) as playing:
        assert (await playing.coordinator.next(m.Heartbeat, 30.0)).failures["shadow:new"] == 4
