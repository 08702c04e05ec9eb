"""A server whose connection is lost may have died, or its link is cut: only a death counts against what it had."""

from pathlib import Path

import pytest

from protocol.wire import messages as m
from tests.learner.coordinator.coordinator_script import Script, settings_of

_DEATHS = "SELECT count(*) FROM failures WHERE boundary = 'server'"


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return Script(tmp_path, settings_of(run={"max_steps": 50}))


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


def test_link_that_is_cut_again_and_again_gives_no_sample_up(script: Script) -> None:
    for _ in range(6):
        (lease,) = script.demand("s1", num_groups=1)
        lose_connection(script)
    (lease,) = script.demand("s1", num_groups=1)
    assert num_deaths(script) == 0
    script.finish("s1", lease)
    assert script.states() == {"ready": 1}


def test_server_that_lost_its_connection_and_says_hello_had_died_with_what_it_made(script: Script) -> None:
    (lease,) = script.demand("s1", num_groups=1)
    lose_connection(script)
    assert num_deaths(script) == 0
    say_hello(script)
    assert num_deaths(script) == len(lease.sample_indices)
    say_hello(script)
    assert num_deaths(script) == len(lease.sample_indices)


def test_server_that_lost_its_connection_and_whose_process_ended_had_died(script: Script) -> None:
    (lease,) = script.demand("s1", num_groups=1)
    lose_connection(script)
    script.coordinator.lose_server("s1", "s1 died")
    assert num_deaths(script) == len(lease.sample_indices)


def test_samples_that_came_back_from_elsewhere_are_not_blamed_for_a_death_that_is_known_later(script: Script) -> None:
    script.demand("s1", num_groups=1)
    lose_connection(script)
    (again,) = script.demand("s2", num_groups=1)
    script.finish("s2", again)
    say_hello(script)
    assert num_deaths(script) == 0


def test_prompt_that_ends_every_server_is_given_up_though_deaths_are_known_late(script: Script) -> None:
    (killer,) = script.demand("s1", num_groups=1)
    for _ in range(5):
        lose_connection(script)
        say_hello(script)
        leased = [lease.group for lease in script.demand("s1", num_groups=1)]
    assert killer.group not in leased
    assert script.states()["skipped"] == 1


def test_samples_of_a_link_that_was_cut_are_not_blamed_when_the_server_dies_later(script: Script) -> None:
    script.demand("s1", num_groups=1)
    lose_connection(script)
    script.demand("s2", num_groups=1)
    script.demand("s1", num_groups=0)  # it speaks: its link had been cut
    script.coordinator.lose_server("s1", "s1 died")
    assert num_deaths(script) == 0
