"""A weight push while a server answers no ping, or slowly, or is left out: the others get the weights meanwhile."""

import time

import pytest

from learner.weights.push import WeightPusher
from tests.learner.weights.fake_server import FakeServer
from tests.learner.weights.pushing import DEADLINE_S, holds, make_pusher, push


def test_server_that_is_left_out_is_not_called_and_joins_again_afterwards(pushers: list[WeightPusher]) -> None:
    kept, absent = FakeServer("kept"), FakeServer("absent")
    pusher = make_pusher(pushers, [kept, absent])
    push(pusher, 1)
    calls = list(absent.calls)
    pusher.set_absent(["absent"])
    reports = [push(pusher, version) for version in (2, 3)]
    assert [report.synced for report in reports] == [("kept",), ("kept",)]
    assert reports[1].failed == {"absent": "the coordinator has no connection to it"}
    assert absent.calls == calls

    pusher.set_absent([])
    version, end = 4, time.monotonic() + 30.0
    while push(pusher, version).synced != ("absent", "kept") and time.monotonic() < end:
        version += 1
        time.sleep(0.05)
    assert (holds(kept, version), holds(absent, version)) == (True, True)


@pytest.mark.parametrize("state", ["join", "prepare", "receive", "bucket", "commit"])
def test_server_out_of_reach_is_left_out_long_before_the_deadline(pushers: list[WeightPusher], state: str) -> None:
    servers = [FakeServer("good"), FakeServer("cut off", (state, "hang"))]
    servers[1].is_silent = True
    start = time.monotonic()
    report = push(make_pusher(pushers, servers), 1)
    took_s = time.monotonic() - start
    servers[1].release()

    assert report.synced == ("good",)
    assert holds(servers[0], 1)
    assert report.failed["cut off"] in (
        f"cut off answered no ping for 1 s while it was to {'receive' if state == 'bucket' else state}",
        "cut off did not answer within 1.0 s",
    )
    assert took_s < DEADLINE_S / 2


def test_server_that_is_slow_and_answers_pings_is_waited_for(pushers: list[WeightPusher]) -> None:
    server = FakeServer("slow")
    pushers.append(pusher := WeightPusher([server], "127.0.0.1", "gloo", DEADLINE_S, silence_s=0.4))
    server.delay_s = 0.8
    report = push(pusher, 1)

    assert report.synced == ("slow",)


def test_server_that_is_silent_while_it_is_probed_is_no_longer_synced(pushers: list[WeightPusher]) -> None:
    servers = [FakeServer("good"), FakeServer("cut off", ("probe", "hang"))]
    pusher = make_pusher(pushers, servers)
    push(pusher, 1)
    servers[1].is_silent = True

    faults = pusher.verify(1, [7, 8, 9])
    assert list(faults) == ["cut off"]
    assert "answered no ping for 1 s" in faults["cut off"]


def test_server_that_was_out_of_reach_is_synced_when_it_is_back(pushers: list[WeightPusher]) -> None:
    server, other = FakeServer("back"), FakeServer("good")
    pusher = make_pusher(pushers, [server, other])
    push(pusher, 1)
    server.fault, server.is_silent = ("prepare", "hang"), True
    cut = push(pusher, 2)
    server.fault, server.is_silent = None, False
    version = 3
    end = time.monotonic() + 30.0
    while "back" not in push(pusher, version).synced and time.monotonic() < end:
        version += 1
        time.sleep(0.05)

    assert list(cut.failed) == ["back"]
    assert holds(server, version)
