"""A run's command and a fleet that ended: Ray starts it again, which takes seconds and is not a death of the run."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from learner.cluster import fleet
from protocol.errors import NeighbourError, OperatorError

Answering = Callable[[list[bool]], list[bool]]


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Answering:
    """Return how to have the fleet answer (True) or be unavailable, call by call; it returns what is left of them."""

    def put(answers: list[bool]) -> list[bool]:
        def call(_reference: object, who: str) -> None:
            if not answers.pop(0):
                raise NeighbourError(who, "died: The actor is temporarily unavailable")

        described = SimpleNamespace(describe_self=SimpleNamespace(remote=lambda: None))
        monkeypatch.setattr(fleet, "find_fleet", lambda: described)
        monkeypatch.setattr(fleet, "call", call)
        monkeypatch.setattr(fleet, "RETRY_S", 0.0)
        return answers

    return put


def test_fleet_that_is_being_started_again_is_waited_for(answering: Answering) -> None:
    left = answering([False, False, True, True])
    fleet.await_fleet()
    assert left == [True]


def test_fleet_that_a_head_is_about_to_make_again_is_waited_for(
    answering: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, num_missing = answering([True, True]), [3]

    def find_fleet() -> object:
        if num_missing[0]:
            num_missing[0] -= 1
            raise OperatorError("The cluster has no fleet.")
        return found()

    found = fleet.find_fleet
    monkeypatch.setattr(fleet, "find_fleet", find_fleet)
    fleet.await_fleet()
    assert left == [True]


def test_fleet_that_does_not_come_back_is_named(answering: Answering, monkeypatch: pytest.MonkeyPatch) -> None:
    answering([False])
    monkeypatch.setattr(fleet, "CALL_S", -1.0)
    with pytest.raises(NeighbourError, match="the fleet: died: The actor is temporarily unavailable"):
        fleet.await_fleet()
