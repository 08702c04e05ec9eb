"""What the coordinator knows of servers, and whom it leases to next."""

from typing import Any

import pytest

from learner.coordinator.servers import Servers
from protocol.wire import messages as m

STAMP: dict[str, Any] = {"run_id": "r1", "incarnation": 1}


def demand(num_wanted: int, version: int | None, heard_of: int = 0, leases: int = 0) -> m.Demand:
    held = {f"g{number}": 1 for number in range(leases)}
    return m.Demand(**STAMP, num_groups=num_wanted, policy_version=version, heard_of_lease=heard_of, leases=held)


def book_of(**servers: tuple[int, int | None]) -> Servers:
    """Return a book of servers that want so many groups and hold weights of such a version."""
    book = Servers()
    for name, (num_wanted, version) in servers.items():
        book.note_demand(name, demand(num_wanted, version))
    return book


def test_next_to_lease_is_the_server_that_wants_most() -> None:
    assert book_of(s1=(1, 4), s2=(3, 4), s3=(2, 4)).next_to_lease(range(4, 5)) == "s2"


def test_new_server_with_less_room_gets_groups_until_it_has_as_many() -> None:
    book = Servers()
    book.note_demand("busy", demand(250, 4, leases=4))  # its samples wait for rewards: it wants four times as many
    book.note_demand("new", demand(64, 4))
    leased = []
    for number in range(8):
        leased.append(book.next_to_lease(range(4, 5)))
        book.reserve_slot(str(leased[-1]), number + 1)
    assert leased == ["new"] * 4 + ["busy", "new"] * 2


def test_server_without_room_gets_nothing_though_it_has_the_fewest_groups() -> None:
    book = Servers()
    book.note_demand("full", demand(0, 4, leases=1))
    book.note_demand("roomy", demand(3, 4, leases=9))
    assert book.next_to_lease(range(4, 5)) == "roomy"


@pytest.mark.parametrize(("num_wanted", "version"), [(0, 4), (3, None), (3, 3), (3, 6)])
def test_next_to_lease_is_nobody_without_a_free_slot_or_the_right_weights(num_wanted: int, version: int | None) -> None:
    assert book_of(s1=(num_wanted, version)).next_to_lease(range(4, 6)) is None


def test_reserved_slots_are_counted_down() -> None:
    book = book_of(s1=(2, 4))
    assert [book.reserve_slot("s1", 7), book.reserve_slot("s1", 9)] == [4, 4]
    assert book.next_to_lease(range(4, 5)) is None
    assert book.newest_leases() == {"s1": 9}


def test_server_that_was_lost_is_not_leased_to_until_it_tells_its_version() -> None:
    book = book_of(s1=(2, 4))
    book.forget_state("s1")
    book.note_hello("s1", m.Hello(**STAMP, server="s1", policy_version=4))
    assert book.next_to_lease(range(4, 5)) is None
    book.note_demand("s1", demand(1, 4))
    assert book.next_to_lease(range(4, 5)) == "s1"


def test_absent_are_servers_that_were_here_and_have_not_spoken_since_they_were_lost() -> None:
    book = book_of(s1=(2, 4), s2=(2, 4))
    assert book.absent() == []
    book.forget_state("s2")
    assert book.absent() == ["s2"]
    book.note("s2")
    assert book.absent() == []


def test_repeated_demand_is_not_new_until_its_server_was_lost() -> None:
    book = book_of(s1=(2, 4))
    assert not book.note_demand("s1", demand(2, 4))
    assert book.note_demand("s1", demand(1, 4))
    book.forget_state("s1")
    assert book.note_demand("s1", demand(1, 4))


def test_room_of_a_demand_is_less_the_leases_that_its_server_has_not_heard_of() -> None:
    book = book_of(s1=(3, 4))
    for number in (7, 8):
        book.reserve_slot("s1", number)
    book.note_demand("s1", demand(2, 4, heard_of=7))  # it crossed lease 8
    book.reserve_slot("s1", 9)
    assert book.next_to_lease(range(4, 5)) is None
    book.note_demand("s1", demand(2, 4, heard_of=7))
    assert book.next_to_lease(range(4, 5)) is None
    book.note_demand("s1", demand(1, 4, heard_of=9))
    assert book.next_to_lease(range(4, 5)) == "s1"


def test_server_that_started_again_has_all_the_room_that_it_names() -> None:
    book = book_of(s1=(1, 4))
    book.reserve_slot("s1", 7)
    book.forget_state("s1")
    book.note_demand("s1", demand(1, 4))
    assert book.next_to_lease(range(4, 5)) == "s1"
