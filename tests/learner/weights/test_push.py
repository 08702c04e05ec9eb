"""The weight push against servers that are healthy, dead, silent or lying; gloo, sockets and deadlines are real.

The real engine behind the same push is in tests/flow/test_push_parity.py.
"""

import time
from collections.abc import Iterator

import psutil
import pytest
import torch

from learner.weights.feed import default_bucket_bytes
from learner.weights.push import WeightPusher
from tests.fakes.waiting import wait_until
from tests.learner.weights.fake_server import FakeServer
from tests.learner.weights.pushing import DEADLINE_S, PLAN, SHORT_DEADLINE_S, holds, make_pusher, push, weights


def test_push_gives_every_server_the_weights_and_the_version(pushers: list[WeightPusher]) -> None:
    servers = [FakeServer("one"), FakeServer("two")]
    servers[0].pause_s = 0.125
    report = push(make_pusher(pushers, servers), 1)

    assert (report.synced, report.failed) == (("one", "two"), {})
    assert [holds(server, 1) for server in servers] == [True, True]
    assert servers[0].calls == ["join", "prepare", "receive", "commit"]
    assert servers[0].weights["b"].dtype == torch.bfloat16
    assert report.num_bytes == 3 * 4096
    assert (report.pause_s, report.push_s > 0.0) == (0.25, True)


def test_second_push_reuses_the_group(pushers: list[WeightPusher]) -> None:
    server = FakeServer("one")
    pusher = make_pusher(pushers, [server])
    first, second = push(pusher, 1), push(pusher, 2)

    assert holds(server, 2)
    assert server.calls.count("join") == 1
    assert first.digest != second.digest


def test_first_bucket_is_gathered_before_anyone_is_asked_for_anything(pushers: list[WeightPusher]) -> None:
    server = FakeServer("one")
    seen: list[list[str]] = []

    def gather() -> Iterator[list[tuple[str, torch.Tensor]]]:
        named = list(weights(1.0).items())
        for bucket in (named[:1], named[1:]):
            seen.append(list(server.calls))
            yield bucket

    make_pusher(pushers, [server]).push(1, PLAN, gather())

    assert seen[0] == ["join"]
    assert "prepare" in seen[1]


@pytest.mark.parametrize("kind", ["raise", "hang"])
@pytest.mark.parametrize("state", ["join", "prepare", "receive", "bucket", "commit"])
def test_failing_server_is_named_within_the_deadline_and_the_other_gets_the_weights(
    pushers: list[WeightPusher], state: str, kind: str
) -> None:
    servers = [FakeServer("good"), FakeServer("bad", (state, kind))]
    pusher = make_pusher(pushers, servers, SHORT_DEADLINE_S)
    start = time.monotonic()
    report = push(pusher, 1)
    took_s = time.monotonic() - start
    servers[1].release()

    assert report.synced == ("good",)
    assert holds(servers[0], 1)
    assert list(report.failed) == ["bad"]
    assert "bad" in report.failed["bad"]
    assert ("is gone" if kind == "raise" else "did not") in report.failed["bad"]
    assert took_s < (SHORT_DEADLINE_S if kind == "raise" else 2 * SHORT_DEADLINE_S)
    assert servers[0].calls == ["join", "prepare", "receive", "commit"]


def test_next_push_does_not_wait_for_a_server_that_failed(pushers: list[WeightPusher]) -> None:
    servers = [FakeServer("good"), FakeServer("bad", ("prepare", "hang"), then=("join", "hang"))]
    pusher = make_pusher(pushers, servers, SHORT_DEADLINE_S)
    push(pusher, 1)
    start = time.monotonic()
    report = push(pusher, 2)
    took_s = time.monotonic() - start

    assert took_s < SHORT_DEADLINE_S
    assert report.synced == ("good",)
    assert list(report.failed) == ["bad"]


def test_server_that_joins_while_a_push_goes_on_is_told_as_not_synced(pushers: list[WeightPusher]) -> None:
    late = FakeServer("late", ("prepare", "raise"), then=("join", "wait"))
    pusher = make_pusher(pushers, [FakeServer("good"), late])

    def gather() -> Iterator[list[tuple[str, torch.Tensor]]]:
        named = list(weights(2.0).items())
        late.waits_for.set()
        wait_until(lambda: late.is_joined)
        time.sleep(0.5)  # the learner's end hears of it a moment later; should it not, the test shows nothing
        yield from (named[:1], named[1:])

    push(pusher, 1)
    report = pusher.push(2, PLAN, gather())

    assert report.synced == ("good",)
    assert list(report.failed) == ["late"]


def test_failed_server_that_came_back_is_synced_by_a_later_push(pushers: list[WeightPusher]) -> None:
    server = FakeServer("back", ("commit", "raise"))
    pusher = make_pusher(pushers, [server])
    first = push(pusher, 1)
    server.fault = None
    end = time.monotonic() + 30.0
    version = 2
    while not push(pusher, version).synced and time.monotonic() < end:
        version += 1
        time.sleep(0.05)

    assert list(first.failed) == ["back"]
    assert holds(server, version)


def test_changed_servers_leave_and_join(pushers: list[WeightPusher]) -> None:
    old, kept, new = FakeServer("old"), FakeServer("kept"), FakeServer("new")
    pusher = make_pusher(pushers, [old, kept])
    push(pusher, 1)
    pusher.set_servers([kept, new])
    report = push(pusher, 2)

    assert report.synced == ("kept", "new")
    assert old.calls[-1] == "leave"
    assert kept.calls.count("join") == 1
    assert (holds(old, 1), holds(kept, 2), holds(new, 2)) == (True, True, True)


def test_learner_that_fails_between_buckets_leaves_no_version_and_servers_join_again(
    pushers: list[WeightPusher],
) -> None:
    server = FakeServer("one")

    def gather() -> Iterator[list[tuple[str, torch.Tensor]]]:
        yield [("a", torch.zeros(64, 8))]
        raise RuntimeError("the learner failed")

    pusher = make_pusher(pushers, [server])
    with pytest.raises(RuntimeError, match="the learner failed"):
        pusher.push(1, PLAN, gather())

    assert server.version is None
    assert "commit" not in server.calls
    assert push(pusher, 2).failed == {"one": "the learner aborted the push"}
    wait_until(lambda: push(pusher, 3).synced == ("one",))


@pytest.mark.parametrize(
    ("gathered", "text"),
    [
        ([["a"], ["c"]], r"\('c', \(300,\)\)\] where the bucket has \[\('c\', \(300,\)\)\]"),
        ([["a"], ["c", "b"]], r"the plan has \[\('b', \(100,\)\), .* where the bucket has \[\('c', \(300,\)\)\]"),
        ([["a"]], r"the plan has \[\('b', \(100,\)\), \('c', \(300,\)\)\] where the bucket has \[\]"),
        ([["a"], ["b", "c"], ["a"]], r"a bucket of \['a'\] is not in the plan"),
    ],
    ids=["missing", "order", "short", "surplus"],
)
def test_buckets_that_are_not_as_planned_are_refused(
    pushers: list[WeightPusher], gathered: list[list[str]], text: str
) -> None:
    server, named = FakeServer("one"), weights(1.0)
    buckets = [[(name, named[name]) for name in bucket] for bucket in gathered]

    with pytest.raises(ValueError, match=text):
        make_pusher(pushers, [server]).push(1, PLAN, iter(buckets))

    assert "commit" not in server.calls


def test_tensor_of_another_shape_than_planned_is_refused(pushers: list[WeightPusher]) -> None:
    with pytest.raises(ValueError, match=r"has \[\('a', \(64, 8\)\)\] where the bucket has \[\('a', \(8, 64\)\)\]"):
        make_pusher(pushers, [FakeServer("one")]).push(1, PLAN, iter([[("a", torch.zeros(8, 64))]]))


def test_every_synced_server_is_verified(pushers: list[WeightPusher]) -> None:
    servers = [FakeServer("good"), FakeServer("bad", ("prepare", "raise")), FakeServer("mute", ("probe", "raise"))]
    pusher = make_pusher(pushers, servers)
    push(pusher, 1)
    judged: dict[str, list[float]] = {}
    faults = pusher.verify(1, [7, 8, 9], lambda name, logprobs: judged.update({name: logprobs}))

    assert judged == {"good": [-8.0, -9.0]}
    assert faults == {"mute": "mute failed to probe: mute is gone"}
    assert pusher.faults.keys() == {"bad", "mute"}
    assert pusher.verify(1, [7, 8, 9]) == {}
    assert servers[2].calls.count("probe") == 1
    assert [server.served for server in servers] == [1, None, None]


def test_server_with_other_logprobs_does_not_serve_until_a_good_push(pushers: list[WeightPusher]) -> None:
    servers = [FakeServer("good"), FakeServer("liar")]
    pusher = make_pusher(pushers, servers)
    push(pusher, 1)
    faults = pusher.verify(1, [7, 8, 9], lambda name, logprobs: "it lies" if name == "liar" else None)
    end = time.monotonic() + 30.0
    while push(pusher, 2).synced != ("good", "liar") and time.monotonic() < end:  # it joins anew in the background
        time.sleep(0.05)
    served = [server.served for server in servers]
    again = pusher.verify(2, [7, 8, 9], lambda name, logprobs: None)

    assert (faults, again) == ({"liar": "it lies"}, {})
    assert served == [1, None]
    assert servers[1].calls.count("join") == 2
    assert [server.served for server in servers] == [2, 2]


def test_closing_leaves_the_groups_of_the_servers_that_are_there(pushers: list[WeightPusher]) -> None:
    servers = [FakeServer("good"), FakeServer("bad", ("prepare", "raise"))]
    pusher = WeightPusher(servers, "127.0.0.1", "gloo", DEADLINE_S)
    push(pusher, 1)
    pusher.close()

    assert servers[0].calls[-1] == "leave"


def test_push_listens_on_its_address_alone(pushers: list[WeightPusher]) -> None:
    def listening() -> set[tuple[str, int]]:
        found = psutil.Process().net_connections("tcp")
        return {tuple(each.laddr) for each in found if each.status == psutil.CONN_LISTEN}

    before = listening()
    push(make_pusher(pushers, [FakeServer("one")]), 1)

    assert {address for address, _ in listening() - before} == {"127.0.0.1"}


def test_push_to_no_servers_reports_nobody(pushers: list[WeightPusher]) -> None:
    report = push(make_pusher(pushers, []), 1)

    assert (report.synced, report.failed, report.pause_s) == ((), {}, 0.0)


@pytest.mark.parametrize(("backend", "num_bytes"), [("gloo", 16 * 1024**2), ("nccl", 256 * 1024**2)])
def test_bucket_size_depends_on_the_device(backend: str, num_bytes: int) -> None:
    assert default_bucket_bytes(backend) == num_bytes
