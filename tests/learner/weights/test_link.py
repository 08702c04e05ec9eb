"""What a link to servers leaves behind when it is broken off."""

import asyncio
import gc
import warnings

from learner.weights.calls import Limits
from learner.weights.link import WeightLink
from learner.weights.rendezvous import GlooRendezvous
from tests.learner.weights.fake_server import FakeServer


async def test_calls_that_are_cancelled_before_they_begin_leave_no_coroutine_unawaited() -> None:
    servers = [FakeServer("rollout-0"), FakeServer("rollout-1")]
    attempts = iter([("run/1", 1), ("run/1", 2)])
    link = WeightLink(servers, Limits(1.0, 1.0), lambda num: GlooRendezvous("127.0.0.1", 1, num, 1, 1.0), attempts)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        joining = asyncio.ensure_future(link.join())
        begun = {asyncio.current_task(), joining}
        while not (calls := asyncio.all_tasks() - begun):
            await asyncio.sleep(0)
        for call in calls:
            call.cancel()
        joining.cancel()
        await asyncio.gather(joining, *calls, return_exceptions=True)
        del calls, call
        gc.collect()
    assert [str(warning.message) for warning in caught] == []
