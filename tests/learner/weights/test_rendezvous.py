"""Where each server of a broadcast group is told to stand."""

from typing import Any

import pytest

from learner.weights.rendezvous import GlooRendezvous, NcclRendezvous


@pytest.mark.parametrize("rendezvous", [NcclRendezvous("127.0.0.1", 3, 2), GlooRendezvous("127.0.0.1", 1, 3, 2, 5.0)])
def test_every_rank_of_the_world_is_taken_once(rendezvous: Any) -> None:
    inits = [rendezvous.init(place) for place in range(3)]
    ranks = [init["rank_offset"] + worker for init in inits for worker in range(2)]

    assert {init["world_size"] for init in inits} == {7}
    assert ranks == [1, 2, 3, 4, 5, 6]


def test_all_servers_of_one_attempt_are_told_the_same_place_to_meet() -> None:
    inits = [NcclRendezvous("127.0.0.1", 2, 1).init(place) for place in range(2)]
    assert inits[0]["master_address"] == "127.0.0.1"
    rendezvous = NcclRendezvous("127.0.0.1", 2, 1)
    assert rendezvous.init(0)["master_port"] == rendezvous.init(1)["master_port"]


def test_each_gloo_attempt_has_a_key_of_its_own() -> None:
    keys = [GlooRendezvous("127.0.0.1", 1, 1, 1, 5.0).init(0)["key"] for _ in range(2)]
    assert keys[0] != keys[1]
