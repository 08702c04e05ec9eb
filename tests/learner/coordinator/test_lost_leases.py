"""Leases that do not come back: servers that go silent or die, messages that are lost on the way."""

from pathlib import Path

import pytest

from protocol.wire import messages as m
from tests.learner.coordinator.coordinator_script import Script, settings_of


def test_lease_that_expires_three_times_is_a_dead_letter(script: Script) -> None:
    (lease,) = script.demand(num_groups=1)
    for _ in range(2):
        script.advance(101.0)
        (again,) = script.demand(num_groups=1)
        assert again.group == lease.group
    script.advance(101.0)
    assert script.rows("SELECT \"group\", reason FROM prompts WHERE state = 'skipped'") == [
        (lease.group, "sample 0: " + "; ".join(["lease: s1 did not bring it back within 100 s"] * 3))
    ]


def test_late_result_of_an_expired_lease_is_used_and_the_second_one_is_a_duplicate(script: Script) -> None:
    (lease,) = script.demand(num_groups=1)
    script.advance(101.0)
    (again,) = script.demand("s2", num_groups=1)
    assert script.finish("s1", lease) == ["accepted", "accepted"]
    assert script.finish("s2", again) == ["duplicate", "duplicate"]


def test_server_that_says_hello_again_has_lost_its_leases(script: Script) -> None:
    leases = script.demand(num_groups=2)
    script.tell("s1", m.Hello(**script.stamp, server="s1", policy_version=0))
    again = script.demand("s2", num_groups=2)
    assert [lease.group for lease in again] == [lease.group for lease in leases]
    assert {lease.attempt for lease in again} == {2}


def test_server_that_died_is_given_nothing_until_it_asks_again(script: Script) -> None:
    script.demand(num_groups=2)
    script.tell("s1", m.Demand(**script.stamp, num_groups=2, policy_version=0, heard_of_lease=0, leases={}))
    script.coordinator.lose_server("s1", "s1: died")
    assert script.take("s1", m.Lease) == []
    assert script.states() == {"pending": 2}
    assert script.rows("SELECT DISTINCT reason FROM prompts") == [("server: s1: died",)]
    assert script.rows("SELECT detail FROM events WHERE kind = 'server_lost'") == [("s1: died",)]


def test_lease_that_a_server_heard_of_and_does_not_have_goes_out_again(script: Script) -> None:
    lost, kept = script.demand(num_groups=2)
    (again,) = script.demand(num_groups=1, heard_of=2, here={kept.group: 1})
    assert (again.group, again.attempt, again.number) == (lost.group, 2, 3)
    assert script.coordinator.counts["lost_leases"] == 1
    assert script.rows("SELECT * FROM failures") == []


def test_lease_that_a_server_has_not_heard_of_yet_stays_with_it(script: Script) -> None:
    script.demand(num_groups=2)
    assert {lease.number for lease in script.demand(num_groups=9, heard_of=0)} == {3, 4}


def test_second_lease_that_was_lost_is_not_taken_for_the_first(script: Script) -> None:
    (lease,) = script.demand(num_groups=1)
    script.fail("s1", lease, 0)
    (second,) = script.demand(num_groups=1)
    (third,) = script.demand(num_groups=1, heard_of=2, here={lease.group: 1})
    assert [second.attempt, third.attempt, third.sample_indices] == [2, 3, [0, 1]]


def test_server_without_a_connection_for_four_seconds_has_lost_its_leases(script: Script) -> None:
    (lease,) = script.demand(num_groups=1)
    (ping,) = script.take("s1", m.Ping)
    assert ping.newest_lease == 1
    for seconds in (0.0, 1.0, 2.0, 3.0):
        script.coordinator.on_undeliverable("s1", ping, script.now + seconds)
        assert script.demand("s2", num_groups=0) == []
    script.coordinator.on_undeliverable("s1", ping, script.now + 4.0)
    (again,) = script.demand("s2", num_groups=1)
    assert again.group == lease.group
    assert script.rows("SELECT * FROM failures") == []  # its link may be cut: nobody died as far as is known


def test_server_that_brings_a_result_has_a_connection(script: Script) -> None:
    (lease,) = script.demand(num_groups=1)
    (ping,) = script.take("s1", m.Ping)
    script.coordinator.on_undeliverable("s1", ping, script.now)
    script.advance(3.0)
    script.deliver("s1", lease, 0)
    script.advance(2.0)
    script.coordinator.on_undeliverable("s1", ping, script.now)
    assert script.states() == {"leased": 1}


@pytest.mark.parametrize("kind", ["train", "eval"])
def test_group_on_two_servers_is_given_up_once_when_both_are_late(tmp_path: Path, kind: str) -> None:
    held_out = {"data": {"train": "a", "eval": "b"}, "eval": {"every_steps": 5, "samples": 1}}
    script = Script(tmp_path, settings_of(**(held_out if kind == "eval" else {})), num_held_out=1)
    for index in (0, 1):  # each fails once by itself, then with the other: the first has its third failure so
        (lease,) = script.demand("s1", num_groups=1)
        assert lease.kind == kind
        script.fail("s1", lease, index)
        (other,) = script.demand("s2", num_groups=1)
        assert (other.group, other.sample_indices) == (lease.group, [index])
        script.demand("s2", num_groups=0)
        script.advance(101.0)
    assert script.coordinator.counts["skipped"] == 1
    assert lease.group not in {each.group for each in script.demand("s1")}


# -- a lost connection: the server may have died, or its link is cut --------------------------------------------------


@pytest.fixture
def long_run(tmp_path: Path) -> Script:
    return Script(tmp_path, settings_of(run={"max_steps": 50}))


_DEATHS = "SELECT count(*) FROM failures WHERE boundary = 'server'"


def lose_connection(script: Script, server: str = "s1") -> None:
    """Let pings to a server find no connection for as long as it may try again."""
    ping = m.Ping(**script.stamp, newest_lease=1)
    for seconds in (0.0, 4.0):
        script.coordinator.on_undeliverable(server, ping, script.now + seconds)
    script.advance(4.0)


def say_hello(script: Script, server: str = "s1") -> None:
    script.tell(server, m.Hello(**script.stamp, server=server, policy_version=0))


def num_deaths(script: Script) -> int:
    script.advance()
    ((number,),) = script.rows(_DEATHS)
    return int(number)


def test_link_that_is_cut_again_and_again_gives_no_sample_up(long_run: Script) -> None:
    for _ in range(6):
        (lease,) = long_run.demand("s1", num_groups=1)
        lose_connection(long_run)
    (lease,) = long_run.demand("s1", num_groups=1)
    assert num_deaths(long_run) == 0
    long_run.finish("s1", lease)
    assert long_run.states() == {"ready": 1}


def test_server_that_lost_its_connection_and_says_hello_had_died_with_what_it_made(long_run: Script) -> None:
    (lease,) = long_run.demand("s1", num_groups=1)
    lose_connection(long_run)
    assert num_deaths(long_run) == 0
    say_hello(long_run)
    assert num_deaths(long_run) == len(lease.sample_indices)
    say_hello(long_run)
    assert num_deaths(long_run) == len(lease.sample_indices)


def test_server_that_lost_its_connection_and_whose_process_ended_had_died(long_run: Script) -> None:
    (lease,) = long_run.demand("s1", num_groups=1)
    lose_connection(long_run)
    long_run.coordinator.lose_server("s1", "s1 died")
    assert num_deaths(long_run) == len(lease.sample_indices)


def test_samples_that_came_back_from_elsewhere_are_not_blamed_for_a_death_that_is_known_later(long_run: Script) -> None:
    long_run.demand("s1", num_groups=1)
    lose_connection(long_run)
    (again,) = long_run.demand("s2", num_groups=1)
    long_run.finish("s2", again)
    say_hello(long_run)
    assert num_deaths(long_run) == 0


def test_prompt_that_ends_every_server_is_given_up_though_deaths_are_known_late(long_run: Script) -> None:
    (killer,) = long_run.demand("s1", num_groups=1)
    for _ in range(5):
        lose_connection(long_run)
        say_hello(long_run)
        leased = [lease.group for lease in long_run.demand("s1", num_groups=1)]
    assert killer.group not in leased
    assert long_run.states()["skipped"] == 1


def test_samples_of_a_link_that_was_cut_are_not_blamed_when_the_server_dies_later(long_run: Script) -> None:
    long_run.demand("s1", num_groups=1)
    lose_connection(long_run)
    long_run.demand("s2", num_groups=1)
    long_run.demand("s1", num_groups=0)  # it speaks: its link had been cut
    long_run.coordinator.lose_server("s1", "s1 died")
    assert num_deaths(long_run) == 0
