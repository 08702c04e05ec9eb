"""Where each server of a broadcast group is told to stand."""

import socket
from collections.abc import Callable

import pytest

from learner.weights.rendezvous import GlooRendezvous, NcclRendezvous, Rendezvous, SameMachineRendezvous
from protocol.weights.same_machine import SameMachineGroup


@pytest.mark.parametrize(
    "begin",
    [lambda: NcclRendezvous("127.0.0.1", 3, 2, 5.0), lambda: GlooRendezvous("127.0.0.1", 1, 3, 2, 5.0)],
    ids=["nccl", "gloo"],
)
def test_every_rank_of_the_world_is_taken_once(begin: Callable[[], Rendezvous]) -> None:
    rendezvous = begin()
    inits = [rendezvous.init(place) for place in range(3)]
    rendezvous.close()
    ranks = [init["rank_offset"] + worker for init in inits for worker in range(2)]

    assert {init["world_size"] for init in inits} == {7}
    assert ranks == [1, 2, 3, 4, 5, 6]


def test_place_to_meet_is_one_for_all_and_taken_before_anyone_is_told_of_it() -> None:
    rendezvous = NcclRendezvous("127.0.0.1", 2, 1, 5.0)
    inits = [rendezvous.init(place) for place in range(2)]
    assert inits[0]["deadline_s"] == 10.0, "twice the learner's"
    (place,) = {(init["master_address"], init["master_port"]) for init in inits}
    with pytest.raises(OSError, match="in use"):
        socket.create_server(place)
    rendezvous.close()

    assert place[0] == "127.0.0.1"


def test_each_gloo_attempt_has_a_key_of_its_own() -> None:
    keys = [GlooRendezvous("127.0.0.1", 1, 1, 1, 5.0).init(0)["key"] for _ in range(2)]
    assert keys[0] != keys[1]


def test_each_attempt_on_one_machine_has_a_name_of_its_own_that_ends_with_it() -> None:
    attempts = [SameMachineRendezvous(1, 1, 5.0) for _ in range(2)]
    names = [attempt.init(0)["name"] for attempt in attempts]
    for attempt in attempts:
        attempt.close()

    assert len({*names}) == 2
    with pytest.raises(ConnectionError, match="no learner of this machine"):
        SameMachineGroup.receive(names[0], 5.0)
