"""Large runs: what one turn of the loop does at most, and what several turns do together."""

import gc
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from protocol.wire import messages as m
from protocol.wire.trajectory import Trajectory
from tests.learner.coordinator.coordinator_script import Script, settings_of


def large(folder: Path, group_size: int) -> Script:
    """Return a run whose steps have 80 groups, all on one version."""
    learner = {"groups_per_step": 80, "max_staleness": 0}
    return Script(folder, settings_of(learner=learner, rollout={"group_size": group_size, "lease_timeout_s": 100}))


@pytest.fixture
def ready(tmp_path: Path) -> Script:
    """Return a run whose step of 2,560 samples is back."""
    script = large(tmp_path, group_size=32)
    for lease in script.demand() + script.take("s1", m.Lease):
        for index in lease.sample_indices:
            trajectory = script.trajectory("s1", lease, index)
            script.tell("s1", m.TrajectoryDone(**script.stamp, facts=trajectory.facts), trajectory.to_buffers())
    return script


@pytest.fixture
def whole(ready: Script) -> Script:
    """Return a run with a step of 2,560 samples that rank 0 trains, and a server that wants more groups."""
    script = ready
    assert script.ask(1) == []  # the groups are assigned: the next turns plan the step
    while not (batches := script.take("rank-0", m.Batch)):
        assert script.coordinator.has_more_to_do
    assert len(batches[0].facts) == 2560
    script.demand(version=1)
    script.mail.clear()
    return script


def end(script: Script) -> None:
    script.tell(
        "rank-0", m.StepEnd(**script.stamp, step=1, policy_version=1, is_applied=True, detail="", metrics={}, request=9)
    )


def num_committed(script: Script) -> int:
    """Return the number of groups that are trained as another process reads it."""
    with closing(sqlite3.connect(script.folder / "ledger.sqlite")) as db:
        return int(db.execute("SELECT count(*) FROM prompts WHERE state = 'trained'").fetchone()[0])


def test_turn_leases_64_groups_and_the_next_one_the_others(tmp_path: Path) -> None:
    script = large(tmp_path, group_size=2)
    assert len(script.demand()) == 64
    assert script.coordinator.has_more_to_do
    assert len(script.take("s1", m.Lease)) == 16
    assert not script.coordinator.has_more_to_do


def test_server_that_asks_again_before_it_has_heard_of_all_its_leases_gets_what_it_has_room_for(tmp_path: Path) -> None:
    script = large(tmp_path, group_size=2)
    first = script.demand(num_groups=70)
    here = {first[0].group: 1}
    script.tell("s1", m.Demand(**script.stamp, num_groups=69, policy_version=0, heard_of_lease=1, leases=here))
    assert len(first) + len(script.take("s1", m.Lease)) == 70
    assert not script.coordinator.has_more_to_do


def test_ranks_that_take_parts_get_at_most_1024_samples_in_one(ready: Script) -> None:
    sizes = []
    for part in range(3):
        ready.tell("rank-0", m.NextBatch(**ready.stamp, step=1, rank=0, part=part))
        while not (batches := ready.take("rank-0", m.Batch)):
            ready.advance()
        sizes.append((len(batches[0].planned), batches[0].is_last))
    assert sizes == [(1024, False), (1024, False), (512, True)]


def test_end_of_a_large_step_takes_several_turns_and_is_committed_and_sent_with_the_last(whole: Script) -> None:
    end(whole)
    num_turns = 0
    while whole.coordinator.is_ending_step:
        assert (num_committed(whole), whole.mail, whole.coordinator.step) == (0, [], 0)
        whole.advance()
        num_turns += 1
    assert num_turns > 1
    assert (num_committed(whole), whole.coordinator.step, len(whole.metrics())) == (80, 1, 1)
    assert [done.request for done in whole.take("rank-0", m.Done)] == [9]
    assert sum(len(trained.groups) for trained in whole.take("s1", m.GroupsTrained)) == 80
    assert whole.take("s1", m.Lease)  # of the next version: none before the end is recorded


def test_one_turn_frees_at_most_1024_samples_of_an_ended_step_and_later_turns_the_others(whole: Script) -> None:
    def num_held() -> int:
        return sum(type(each) is Trajectory for each in gc.get_objects())

    gc.collect()  # what other tests left
    others = num_held() - 2560
    end(whole)
    while whole.coordinator.is_ending_step:
        whole.advance()
    held = [num_held() - others]
    for _ in range(3):
        whole.advance()
        held.append(num_held() - others)
    assert held == [2560, 1536, 512, 0]


def test_repeated_end_of_a_step_that_is_being_recorded_is_confirmed_once(whole: Script) -> None:
    end(whole)
    end(whole)
    while whole.coordinator.is_ending_step:
        whole.advance()
    assert len(whole.take("rank-0", m.Done)) == 1
    assert len(whole.metrics()) == 1


def test_copy_of_the_ledger_has_all_of_a_step_or_nothing(whole: Script) -> None:
    end(whole)
    whole.tell("rank-1", m.SaveLedger(**whole.stamp, path=str(whole.folder / "copy.sqlite"), step=1))
    assert not whole.coordinator.is_ending_step
    with closing(sqlite3.connect(whole.folder / "copy.sqlite")) as db:
        assert db.execute("SELECT count(*) FROM prompts WHERE state = 'trained'").fetchone() == (80,)
