"""Leases that are later than what is usual: another server gets their samples as well."""

from pathlib import Path

import pytest

from learner.coordinator.leases import OverdueLimit
from protocol.wire import messages as m
from tests.learner.coordinator.coordinator_script import Script, settings_of

VERSION = 20


@pytest.fixture
def seasoned(tmp_path: Path) -> Script:
    """A run after twenty steps, whose forty groups took ten seconds each: a lease is overdue after forty."""
    return after(tmp_path, VERSION)


def after(folder: Path, num_steps: int) -> Script:
    """Return a run after so many steps, whose groups, two a step, took ten seconds each."""
    script = Script(folder, settings_of(run={"max_steps": 100}, rollout={"lease_timeout_s": 1000}), num_prompts=200)
    for step in range(1, num_steps + 1):
        leases = script.demand(num_groups=2, version=step - 1)
        script.advance(10.0)
        for lease in leases:
            script.finish("s1", lease, version=step - 1)
        script.batch(step)
        script.step(step, version=step)
    return script


def lease(script: Script, server: str, num_groups: int = 1) -> list[m.Lease]:
    return script.demand(server, num_groups, version=VERSION)


def test_overdue_lease_goes_to_another_server_as_well_and_the_first_result_counts(seasoned: Script) -> None:
    (late,) = lease(seasoned, "s1")
    seasoned.advance(39.0)
    assert lease(seasoned, "s2")[0].group != late.group
    seasoned.want("s1", 5, VERSION)
    seasoned.advance(2.0)
    assert seasoned.coordinator.counts["leased_twice"] == 0  # not to the server that is late
    (again,) = lease(seasoned, "s2")
    assert (again.group, again.attempt, again.sample_indices) == (late.group, 2, [0, 1])
    assert seasoned.finish("s1", late, version=VERSION) == ["accepted", "accepted"]
    assert seasoned.finish("s2", again, version=VERSION) == ["duplicate", "duplicate"]


def test_lease_is_not_overdue_at_the_very_limit(seasoned: Script) -> None:
    (late,) = lease(seasoned, "s1")
    seasoned.advance(40.0)
    assert lease(seasoned, "s2")[0].group != late.group
    seasoned.advance(0.001)
    assert lease(seasoned, "s3")[0].group == late.group


def test_lease_goes_out_twice_and_not_three_times(seasoned: Script) -> None:
    (late,) = lease(seasoned, "s1")
    seasoned.advance(41.0)
    assert lease(seasoned, "s2")[0].group == late.group
    seasoned.advance(41.0)
    assert lease(seasoned, "s3")[0].group != late.group
    assert seasoned.coordinator.counts["leased_twice"] == 1


def test_lease_that_was_given_back_may_be_overdue_again(seasoned: Script) -> None:
    (late,) = lease(seasoned, "s1")
    seasoned.advance(41.0)
    assert lease(seasoned, "s2")[0].group == late.group
    seasoned.coordinator.lose_server("s2", "s2 died")
    assert lease(seasoned, "s3")[0].group == late.group
    seasoned.advance(41.0)
    assert lease(seasoned, "s4")[0].group == late.group
    assert seasoned.coordinator.counts["leased_twice"] == 2


def test_what_is_usual_is_learned_from_groups_that_went_out_once(seasoned: Script) -> None:
    (failed,) = lease(seasoned, "s1")
    seasoned.advance(30.0)
    seasoned.fail("s1", failed, 0)
    (again,) = lease(seasoned, "s1")
    seasoned.advance(35.0)
    seasoned.finish("s1", again, version=VERSION)
    seasoned.deliver("s1", failed, 1, version=VERSION)  # ready, 35 s after its second lease
    (late,) = lease(seasoned, "s1")
    seasoned.advance(41.0)
    assert lease(seasoned, "s2")[0].group == late.group


def observed(limit_s: float, *durations_s: float) -> float:
    limit = OverdueLimit(limit_s)
    for duration_s in durations_s:
        limit.observe(duration_s)
    return limit.overdue_s


def test_limit_is_the_longest_allowed_until_enough_groups_are_back() -> None:
    assert observed(600.0, *[10.0] * 31) == 600.0
    assert observed(600.0, *[10.0] * 32) == 40.0


def test_limit_is_four_times_the_slowest_but_never_below_half_a_minute_nor_above_the_longest_allowed() -> None:
    assert observed(600.0, *[1.0] * 32) == 30.0
    assert observed(600.0, *[1.0] * 31, 20.0) == 80.0
    assert observed(60.0, *[1.0] * 31, 20.0) == 60.0


def test_limit_forgets_groups_of_long_ago() -> None:
    assert observed(600.0, 100.0, *[10.0] * 255) == 400.0
    assert observed(600.0, 100.0, *[10.0] * 256) == 40.0
