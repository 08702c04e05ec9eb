"""Pushes between processes of one machine: the states of a push and its faults are those of the other ways."""

import re
from functools import partial

import pytest

from learner.weights.push import WeightPusher
from tests.learner.weights.fake_server import FakeServer
from tests.learner.weights.pushing import holds, push, push_until_synced


def pusher_of(pushers: list[WeightPusher], *servers: FakeServer) -> WeightPusher:
    pushers.append(WeightPusher(servers, "127.0.0.1", "ipc", 20.0, workers_per_server=2, silence_s=10.0))
    return pushers[-1]


def test_every_worker_of_every_server_takes_the_weights(pushers: list[WeightPusher]) -> None:
    servers = [FakeServer("one", num_workers=2), FakeServer("other", num_workers=2)]
    pusher = pusher_of(pushers, *servers)
    reports = [push(pusher, version) for version in (1, 2)]

    assert [report.synced for report in reports] == [("one", "other")] * 2
    assert [holds(server, 2) for server in servers] == [True, True]


@pytest.mark.parametrize("state", ["join", "prepare", "receive", "bucket", "commit"])
def test_a_server_that_dies_in_any_state_costs_only_itself_and_is_back_with_a_later_push(
    pushers: list[WeightPusher], state: str
) -> None:
    good, bad = FakeServer("good", num_workers=2), FakeServer("bad", num_workers=2)
    pusher = pusher_of(pushers, good, bad)
    if state != "join":
        push(pusher, 1)
    bad.fault = (state, "raise")
    broken = push(pusher, 2)
    bad.fault = None
    version = push_until_synced(partial(push, pusher), 2, "bad", "good")
    assert (broken.synced, [*broken.failed]) == (("good",), ["bad"])
    # Which of the two ends of a closed connection reports first is up to the kernel.
    assert re.search("bad is gone|Broken pipe", broken.failed["bad"])
    assert holds(good, version)
    assert holds(bad, version)
