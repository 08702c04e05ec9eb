"""Servers of two workers each that share one broadcast group, over gloo: NCCL's shape, with real joins and deaths."""

import time
from collections.abc import Iterator
from functools import partial

import pytest

from learner.weights.push import WeightPusher
from tests.learner.weights.fake_server import FakeServer
from tests.learner.weights.pushing import SILENCE_S, holds, push, push_until_synced

GOOD, OTHER, BAD = "good", "other", "bad"


@pytest.fixture
def servers() -> Iterator[list[FakeServer]]:
    made = [FakeServer(name, num_workers=2) for name in (GOOD, BAD, OTHER)]
    yield made
    for server in made:
        server.release()


@pytest.fixture
def pusher(servers: list[FakeServer], pushers: list[WeightPusher]) -> WeightPusher:
    pushers.append(
        WeightPusher(
            servers, "127.0.0.1", "gloo", 20.0, workers_per_server=2, silence_s=10 * SILENCE_S, shares_group=True
        )
    )
    return pushers[0]


def test_every_worker_of_every_server_is_a_rank_of_one_group(pusher: WeightPusher, servers: list[FakeServer]) -> None:
    report = push(pusher, 1)

    assert report.synced == (BAD, GOOD, OTHER)
    assert [(server.inits[0]["rank_offset"], server.inits[0]["world_size"]) for server in servers] == [
        (1, 7),
        (3, 7),
        (5, 7),
    ]
    assert len({server.inits[0]["key"] for server in servers}) == 1
    assert [holds(server, 1) for server in servers] == [True] * 3


@pytest.mark.parametrize("state", ["join", "prepare", "receive", "bucket", "commit"])
def test_server_that_dies_in_any_state_costs_only_itself_and_joins_alone_when_it_is_back(
    pusher: WeightPusher, servers: list[FakeServer], state: str
) -> None:
    if state != "join":
        push(pusher, 1)
    good, bad, other = servers
    bad.fault = (state, "raise")
    broken = push(pusher, 2)
    bad.fault = ("join", "raise")  # it is gone
    version = push_until_synced(partial(push, pusher), 2, GOOD, OTHER)
    shared = good.inits[-1]
    bad.fault = None
    version = push_until_synced(partial(push, pusher), version, BAD, GOOD, OTHER)

    assert "bad" in broken.failed[BAD]
    assert "is gone" in broken.failed[BAD]
    assert (shared["world_size"], shared["key"]) == (5, other.inits[-1]["key"])
    assert good.inits[-1] == shared  # it did not have to meet again for the one that came back
    assert bad.inits[-1]["world_size"] == 3
    assert [holds(server, version) for server in servers] == [True] * 3


def test_servers_that_fail_together_again_and_again_join_alone(pusher: WeightPusher, servers: list[FakeServer]) -> None:
    push(pusher, 1)
    for server in servers:
        server.fault = ("receive", "lose a peer")
    version = 2
    while servers[0].calls.count("receive") < 3:  # the first one went well
        assert push(pusher, version).synced == ()
        version += 1
        time.sleep(0.05)
    for server in servers:
        server.fault = None
    version = push_until_synced(partial(push, pusher), version, BAD, GOOD, OTHER)

    assert {server.inits[-1]["world_size"] for server in servers} == {3}
    assert [holds(server, version) for server in servers] == [True] * 3


def test_late_joiner_is_in_the_next_group(pusher: WeightPusher, servers: list[FakeServer]) -> None:
    push(pusher, 1)
    late = FakeServer("late", num_workers=2)
    pusher.set_servers([*servers, late])
    report = push(pusher, 2)
    late.release()

    assert report.synced == (BAD, GOOD, "late", OTHER)
    assert {server.inits[-1]["world_size"] for server in (*servers, late)} == {9}
    assert holds(late, 2)
