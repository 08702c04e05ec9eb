"""The order in which models and servers leave and enter a shared device."""

from typing import Any, cast

from learner.rank.device_switch import SharedDevice


class Parked:
    def __init__(self, done: list[str]) -> None:
        self._done = done

    def park(self) -> None:
        self._done.append("park")

    def restore(self) -> None:
        self._done.append("restore")


def _device(done: list[str]) -> SharedDevice:
    return SharedDevice(cast(Any, Parked(done)), done.append, lambda: done.append("meet"))


def test_a_rank_learns_first() -> None:
    done: list[str] = []
    _device(done).learn()
    assert done == []


def test_servers_wake_once_every_rank_has_left_and_ranks_come_once_the_servers_sleep() -> None:
    done: list[str] = []
    device = _device(done)
    device.generate()
    assert done == ["park", "meet", "wake"]

    done.clear()
    device.learn()
    assert done == ["sleep", "meet", "restore"]


def test_a_second_switch_to_the_same_side_changes_nothing() -> None:
    done: list[str] = []
    device = _device(done)
    device.generate()
    device.generate()
    device.learn()
    device.learn()
    assert done == ["park", "meet", "wake", "sleep", "meet", "restore"]
