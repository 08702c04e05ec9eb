"""Leases going out: how many, to which server, on which weights."""

from pathlib import Path

import pytest

from protocol.wire import messages as m
from tests.learner.coordinator.coordinator_script import Script


def test_window_leases_no_more_than_its_size(script: Script) -> None:
    assert len(script.demand(num_groups=100)) == 4
    assert script.demand("s2", num_groups=100) == []


def test_slots_are_free_again_when_the_step_is_trained_and_not_when_it_is_assigned(script: Script) -> None:
    script.demand_and_finish()
    script.batch(1)
    assert script.demand(version=0) == []
    script.step(1, version=1)
    assert len(script.demand(version=1)) == 2


def test_last_steps_leave_nothing_out(script: Script) -> None:
    """Six groups are wanted in all: with four trained or out, two more go out, not the window's four."""
    script.train(1)
    assert len(script.demand(version=1)) == 2
    script.batch(2)
    script.step(2, version=2)
    assert script.demand(version=2) == []


def test_server_that_wants_most_is_served_first(script: Script) -> None:
    script.tell("s1", m.Demand(**script.stamp, num_groups=1, policy_version=0, heard_of_lease=0, leases={}))
    script.tell("s2", m.Demand(**script.stamp, num_groups=3, policy_version=0, heard_of_lease=0, leases={}))
    assert (len(script.take("s2", m.Lease)), len(script.take("s1", m.Lease))) == (3, 1)


@pytest.mark.parametrize("version", [None, 0, 2])
def test_server_without_the_current_weights_is_given_nothing(tmp_path: Path, version: int | None) -> None:
    script = Script(tmp_path, step=1)
    assert script.demand(version=version) == []
    assert len(script.demand(version=1)) == 4


def test_server_one_push_ahead_of_the_books_is_given_leases(script: Script) -> None:
    script.demand_and_finish(num_groups=2)
    script.batch(1)
    assert len(script.demand(version=1)) == 2


def test_lease_carries_its_prompt_and_label(script: Script) -> None:
    lease = script.demand(num_groups=1)[0]
    number = lease.prompt.split()[1] if isinstance(lease.prompt, str) else ""
    assert (lease.group, lease.label, lease.kind) == (f"e0-p{number}", f"answer {number}", "train")
    assert (lease.sample_indices, lease.greedy_indices, lease.attempt) == ([0, 1], [], 1)
