"""What a push leaves behind: its report's times, who counts as synced, and links that the learner broke off."""

import time
from collections.abc import Iterator

import pytest
import torch

from learner.weights.push import PushReport, WeightPusher
from protocol.weights.wire import TensorMeta
from tests.fakes.planned_weights import plan_buckets
from tests.learner.weights.fake_server import FakeServer

PLAN = plan_buckets([TensorMeta("a", "float32", (64,)), TensorMeta("b", "float32", (64,))], 256)
QUICK, SLOW = "quick", "slow"


@pytest.fixture
def servers() -> list[FakeServer]:
    return [FakeServer(QUICK), FakeServer(SLOW)]


@pytest.fixture
def pusher(servers: list[FakeServer]) -> Iterator[WeightPusher]:
    pusher = WeightPusher(servers, "127.0.0.1", "gloo", 20.0, silence_s=5.0)
    yield pusher
    pusher.close()


def push(pusher: WeightPusher, version: int) -> PushReport:
    return pusher.push(version, PLAN, iter([[(name, torch.full((64,), float(version)))] for name in "ab"]))


def test_pause_of_a_push_is_that_of_the_slowest_server(pusher: WeightPusher, servers: list[FakeServer]) -> None:
    servers[0].pause_s, servers[1].pause_s = 0.125, 0.5
    report = push(pusher, 1)

    assert report.synced == (QUICK, SLOW)
    assert report.pause_s == 0.5


def test_server_that_failed_a_probe_is_not_probed_again_before_the_next_push(
    pusher: WeightPusher, servers: list[FakeServer]
) -> None:
    push(pusher, 1)
    servers[1].fault = ("probe", "raise")
    faults = [pusher.verify(1, [7, 8]), pusher.verify(1, [7, 8])]

    assert faults == [{SLOW: "slow failed to probe: slow is gone"}, {}]
    assert servers[1].calls.count("probe") == 1


def test_links_that_the_learner_broke_off_say_so_and_join_again(
    pusher: WeightPusher, servers: list[FakeServer]
) -> None:
    def gather() -> Iterator[list[tuple[str, torch.Tensor]]]:
        yield [("a", torch.zeros(64))]
        raise RuntimeError("the learner failed")

    with pytest.raises(RuntimeError, match="the learner failed"):
        pusher.push(1, PLAN, gather())
    report = push(pusher, 2)
    version, end = 3, time.monotonic() + 30.0
    while push(pusher, version).synced != (QUICK, SLOW) and time.monotonic() < end:
        version += 1
        time.sleep(0.05)

    assert report.failed == dict.fromkeys((QUICK, SLOW), "the learner broke the push off")
    assert [server.version for server in servers] == [version, version]
