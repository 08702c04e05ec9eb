"""What a rank makes of servers that compute something else than it does."""

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch

from learner.models.parked import ParkedModels
from learner.models.policy import PolicyEngine
from learner.models.training.optimizer import NonFiniteWeightsError
from learner.rank.device_switch import SharedDevice
from learner.rank.push import RankPusher
from protocol.errors import NeighbourError
from protocol.settings.settings import Settings
from protocol.weights.controls import Attempt
from tests.fakes.planned_weights import planned
from tests.learner.weights.fake_server import FakeServer

WEIGHTS = [("a", torch.ones(8))]


class Policy:
    """Computes what `FakeServer` answers."""

    vocab_size = 100
    plan = planned(WEIGHTS, 64)[0]

    def check_finite(self) -> None:
        """They are."""

    def pushed_weights(self, bucket_bytes: int) -> "Policy":
        return self

    def buckets(self, is_sender: bool) -> Any:
        return planned(WEIGHTS, 64)[1]

    def logprobs(self, batch: Any, temperature: float) -> torch.Tensor:
        return -batch.targets.double()


class Liar(FakeServer):
    """lies: in its answers to probes. wakes: when it is told to."""

    lies = False
    wakes = True

    async def wake(self, attempt: Attempt) -> None:
        if not self.wakes:
            raise NeighbourError(self.name, "died in its sleep")
        await super().wake(attempt)

    async def probe(self, attempt: Attempt, tokens: list[int]) -> list[float]:
        return [logprob + self.lies for logprob in await super().probe(attempt, tokens)]


@pytest.fixture
def servers() -> list[Liar]:
    return [Liar("s1"), Liar("s2")]


@pytest.fixture
def pusher(servers: list[Liar]) -> Iterator[RankPusher]:
    settings = Settings.model_validate({"policy": {"model": "m", "dtype": "float32"}})
    made = RankPusher(cast(PolicyEngine, Policy()), settings, servers, "127.0.0.1", "gloo", range(16))
    yield made
    made.close()


def _push_to_both(pusher: RankPusher, version: int) -> None:
    for _ in range(1000):
        report = pusher.push(version)
        assert report is not None
        if len(report.synced) == 2:
            return
    raise AssertionError(report.failed)


def test_server_with_other_logprobs_affects_no_other_and_returns_with_a_good_push(
    pusher: RankPusher, servers: list[Liar]
) -> None:
    pusher.push(1)
    servers[1].lies = True
    report = pusher.push(2)
    served = [server.served for server in servers]
    servers[1].lies = False
    _push_to_both(pusher, 3)

    assert report is not None
    assert report.synced == ("s1",)
    assert "s2 computes other logprobs than the learner after the push" in report.failed["s2"]
    assert served == [2, 1]
    assert [server.served for server in servers] == [3, 3]


def test_weights_that_are_not_finite_reach_no_server_and_a_push_that_did_is_known_by_its_digest(
    pusher: RankPusher, servers: list[Liar], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(policy: Policy) -> None:
        raise NonFiniteWeightsError("the policy is not finite")

    report = pusher.push(1)
    called = [list(server.calls) for server in servers]
    monkeypatch.setattr(Policy, "check_finite", refuse)
    with pytest.raises(NonFiniteWeightsError):
        pusher.push(2)

    assert report is not None
    assert pusher.digest == report.digest != ""
    assert [server.calls for server in servers] == called


def test_run_ends_when_all_servers_compute_something_else_twice_in_a_row(
    pusher: RankPusher, servers: list[Liar]
) -> None:
    pusher.push(1)
    for server in servers:
        server.lies = True
    report = pusher.push(2)
    assert report is not None
    assert report.synced == ()
    with pytest.raises(NeighbourError, match=r"no server took version 2: .*computes other logprobs"):
        _push_to_both(pusher, 2)


def test_first_push_that_every_server_gets_wrong_ends_the_run(pusher: RankPusher, servers: list[Liar]) -> None:
    for server in servers:
        server.lies = True
    with pytest.raises(NeighbourError, match="no server took version 1: s1 computes other logprobs"):
        pusher.push(1)


def test_servers_that_the_run_has_by_now_are_pushed_to_and_others_no_more(servers: list[Liar]) -> None:
    by_name = {server.name: server for server in servers}
    names = ("s1",)
    settings = Settings.model_validate({"policy": {"model": "m", "dtype": "float32"}})
    pusher = RankPusher(cast(PolicyEngine, Policy()), settings, servers[:1], "127.0.0.1", "gloo", range(16))
    pusher.follow(lambda: names, by_name.__getitem__)
    try:
        assert pushed_to(pusher, 1) == ("s1",)
        names = ("s1", "s2")
        assert pushed_to(pusher, 2) == ("s1", "s2")
        names = ("s2",)
        assert pushed_to(pusher, 3) == ("s2",)
    finally:
        pusher.close()


def test_new_server_that_is_not_there_yet_is_tried_again_at_the_next_push(servers: list[Liar]) -> None:
    there: dict[str, Liar] = {}

    def reach(name: str) -> Liar:
        if name not in there:
            raise NeighbourError(name, "is not running")
        return there[name]

    names = ("s1",)
    settings = Settings.model_validate({"policy": {"model": "m", "dtype": "float32"}})
    pusher = RankPusher(cast(PolicyEngine, Policy()), settings, servers[:1], "127.0.0.1", "gloo", range(16))
    pusher.follow(lambda: names, reach)
    try:
        names = ("s1", "s2")
        assert pushed_to(pusher, 1) == ("s1",)
        there["s2"] = servers[1]
        assert pushed_to(pusher, 2) == ("s1", "s2")
    finally:
        pusher.close()


def pushed_to(pusher: RankPusher, version: int) -> tuple[str, ...]:
    report = pusher.push(version)
    assert report is not None
    return report.synced


def test_servers_on_a_shared_device_wake_between_push_and_probe(pusher: RankPusher, servers: list[Liar]) -> None:
    models = ParkedModels([], torch.device("cpu"))
    pusher.device = SharedDevice(models, pusher.switch_servers, lambda: None)
    pusher.push(1)
    pusher.push(2)

    of_push = ["prepare", "receive", "commit", "wake", "probe", "serve"]
    assert servers[0].calls == ["join", *of_push, "sleep", *of_push]


def test_a_server_that_does_not_wake_affects_no_other(pusher: RankPusher, servers: list[Liar]) -> None:
    pusher.device = SharedDevice(ParkedModels([], torch.device("cpu")), pusher.switch_servers, lambda: None)
    servers[1].fault = ("wake", "raise")
    report = pusher.push(1)
    servers[1].fault = None
    _push_to_both(pusher, 2)

    assert report is not None
    assert report.synced == ("s1",)
    assert [server.served for server in servers] == [2, 2]


def test_servers_that_do_not_wake_push_after_push_do_not_end_the_run(pusher: RankPusher, servers: list[Liar]) -> None:
    pusher.device = SharedDevice(ParkedModels([], torch.device("cpu")), pusher.switch_servers, lambda: None)
    pusher.push(1)
    for server in servers:
        server.wakes = False
    reports = [pusher.push(version) for version in (2, 3, 4)]
    for server in servers:
        server.wakes = True
    _push_to_both(pusher, 5)

    assert [report.synced for report in reports if report is not None] == [(), (), ()]
    assert [server.served for server in servers] == [5, 5]
