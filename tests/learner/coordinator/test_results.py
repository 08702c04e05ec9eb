"""What servers send of a lease: results that count or do not, failures and their dead letters."""

from typing import Any

import pytest

from protocol.errors import FrameError
from protocol.wire import messages as m
from protocol.wire.codec import SampleStamp
from tests.learner.coordinator.coordinator_script import Script
from tests.protocol.wire.examples import make_trajectory


def test_second_result_is_a_duplicate_and_the_first_one_counts(script: Script) -> None:
    lease = script.demand()[0]
    assert script.deliver("s1", lease, 0, reward=1.0).outcome == "accepted"
    assert script.deliver("s1", lease, 0, reward=0.0).outcome == "duplicate"
    assert script.rows("SELECT reward FROM trajectories") == [(1.0,)]


def test_result_of_a_group_that_is_not_out_is_unknown(script: Script) -> None:
    assert script.send_trajectory("s1", make_trajectory("e9-zz", 0, "s1", 0)).outcome == "unknown"


def test_failure_leases_the_missing_sample_alone_again(script: Script) -> None:
    lease = script.demand(num_groups=1)[0]
    script.deliver("s1", lease, 0)
    assert script.fail("s1", lease, 1).outcome == "returned"
    (again,) = script.demand(num_groups=1)
    assert (again.group, again.attempt, again.sample_indices) == (lease.group, 2, [1])
    assert script.coordinator.counts["failed:reward:em"] == 1
    assert script.finish("s1", again) == ["accepted"]
    assert script.states() == {"ready": 1}


def test_third_failure_skips_the_prompt_with_its_reasons_and_another_takes_its_slot(script: Script) -> None:
    leases = script.demand(num_groups=4)
    first = lease = leases[0]
    script.deliver("s1", lease, 0)
    for number in range(3):
        script.fail("s1", lease, 1, detail=f"50{number}")
        (lease,) = script.demand(num_groups=1)
    assert lease.group not in {known.group for known in leases}
    assert script.rows("SELECT \"group\", reason FROM prompts WHERE state = 'skipped'") == [
        (first.group, "sample 1: reward:em: 500; reward:em: 501; reward:em: 502")
    ]
    assert script.states() == {"leased": 4, "skipped": 1}
    # The finished sibling need not be kept by its server.
    assert [t.groups for t in script.take("s1", m.GroupsTrained)] == [[first.group]]


def test_failure_told_by_a_server_that_does_not_hold_the_sample_changes_nothing(script: Script) -> None:
    lease = script.demand(num_groups=1)[0]
    assert script.fail("s2", lease, 0).outcome == "returned"
    assert script.demand("s2", num_groups=1)[0].group != lease.group


def test_failure_told_twice_does_not_count_against_the_next_attempt(script: Script) -> None:
    first = script.demand(num_groups=1)[0]
    script.fail("s1", first, 0)
    (second,) = script.demand(num_groups=1)
    for _ in range(3):
        assert script.fail("s1", first, 0).outcome == "returned"
    assert (second.group, second.attempt) == (first.group, 2)
    assert script.coordinator.counts["failed:reward:em"] == 1
    script.deliver("s1", first, 1)
    assert script.finish("s1", second) == ["accepted"]
    assert script.states() == {"ready": 1}


def test_rejected_trajectories_of_a_sample_that_is_back_do_not_touch_the_step(script: Script) -> None:
    """Three of them once took the group out from under the step that trained on it."""
    leases = script.demand(num_groups=2)
    for lease in leases:
        script.finish("s1", lease)
    script.batch(1)
    for _ in range(3):
        assert script.deliver("s1", leases[0], 0, reward=float("nan")).outcome == "rejected"
    assert script.states() == {"assigned": 2}
    script.step(1, version=1)
    assert script.states() == {"trained": 2}


@pytest.mark.parametrize(
    ("index", "changes", "detail"),
    [
        (0, {"reward": float("nan")}, "$.facts.reward: reward is nan"),
        (0, {"version": 1}, "$.facts.version_spans: has version 1, the learner is at 0"),
        (0, {"server": "s9"}, "$.facts: server is 's9', leased was 's1'"),
        (0, {"kind": "eval"}, "$.facts: kind is 'eval', leased was 'train'"),
        (0, {"is_greedy": True}, "$.facts: is_greedy is True, leased was False"),
        (7, {}, "$.facts: sample_index is 7, the group has 2 samples"),
    ],
)
def test_trajectory_that_is_not_as_leased_or_not_fit_to_train_is_rejected_and_leased_again(
    script: Script, index: int, changes: dict[str, Any], detail: str
) -> None:
    lease = script.demand(num_groups=1)[0]
    ack = script.deliver("s1", lease, index, **changes)
    assert (ack.outcome, ack.detail) == ("rejected", detail)
    if index == 0 and "server" not in changes:
        (again,) = script.demand(num_groups=1)
        assert (again.group, again.sample_indices) == (lease.group, [0])


def test_sample_that_is_refused_three_times_is_given_up(script: Script) -> None:
    error = FrameError("$.facts.finish", "Invalid enum value 'won'", "invalid")
    (lease,) = script.demand(num_groups=1)
    for attempt in (1, 2, 3):
        assert lease.attempt == attempt
        sample = SampleStamp("r1", 1, lease.group, 1, attempt)
        script.coordinator.refuse("s1", error, sample=sample)
        script.coordinator.refuse("s1", error, sample=sample)  # sent again before it was answered: once is enough
        assert [ack.outcome for ack in script.take("s1", m.Ack)] == ["refused", "refused"]
        if attempt < 3:
            (lease,) = script.demand(num_groups=1)
    reason = "; ".join(["trajectory: refused: $.facts.finish: Invalid enum value 'won'"] * 3)
    assert script.rows("SELECT reason FROM prompts WHERE state = 'skipped'") == [(f"sample 1: {reason}",)]


@pytest.mark.parametrize("sample", [SampleStamp("r2", 1, "e0-p0", 0, 1), SampleStamp("r1", 9, "e0-p0", 0, 1), None])
def test_refusal_of_what_is_of_another_start_names_no_sample(script: Script, sample: SampleStamp | None) -> None:
    script.coordinator.refuse("s1", FrameError("$", "is nothing", "invalid"), sample=sample)
    assert [answer.reason for answer in script.take("s1", m.Refusal)] == ["invalid"]


def test_refusal_of_a_sample_that_another_server_holds_gives_nothing_back(script: Script) -> None:
    (lease,) = script.demand("s1", num_groups=1)
    error = FrameError("$", "is nothing", "invalid")
    script.coordinator.refuse("s2", error, sample=SampleStamp("r1", 1, lease.group, 0, 1))
    script.coordinator.refuse("s1", error, sample=SampleStamp("r1", 1, lease.group, 0, 2))
    script.coordinator.refuse("s1", error, sample=SampleStamp("r1", 1, "e0-none", 0, 1))
    assert script.coordinator.counts["retried"] == 0
    assert [ack.outcome for ack in script.take("s1", m.Ack)] == ["refused", "refused"]
    assert script.finish("s1", lease) == ["accepted", "accepted"]


def test_group_that_was_given_up_while_it_waited_for_a_lease_does_not_go_out(script: Script) -> None:
    (lease,) = script.demand(num_groups=1)
    last = lease
    for _ in range(2):
        script.fail("s1", last, 1)
        (last,) = script.demand(num_groups=1)
        assert (last.group, last.sample_indices) == (lease.group, [1])
    script.fail("s1", lease, 0)  # it waits for another lease now
    script.fail("s1", last, 1)  # the third failure of that sample
    (other,) = script.demand(num_groups=1)
    assert other.group != lease.group
    assert script.rows("SELECT state FROM prompts ORDER BY position") == [("skipped",), ("leased",)]


def test_group_that_came_back_while_it_waited_for_another_lease_does_not_go_out(script: Script) -> None:
    (lease,) = script.demand("s1", num_groups=1)
    script.advance(101.0)  # its lease is overdue: it waits for another
    assert script.finish("s1", lease) == ["accepted", "accepted"]
    (other,) = script.demand("s2", num_groups=1)
    assert other.group != lease.group
    assert script.states() == {"ready": 1, "leased": 1}


def test_result_of_a_start_that_has_not_been_is_not_used(script: Script) -> None:
    (lease,) = script.demand(num_groups=1)
    assert script.deliver("s1", lease, 0, incarnation=9).outcome == "unknown"
    assert script.coordinator.counts["unused:lineage"] == 1


def test_result_of_the_weights_that_a_step_under_way_has_pushed_is_used(script: Script) -> None:
    """Rank 0 pushes before it tells that the step ended: a server may be one version ahead, and no more."""
    script.demand_and_finish(num_groups=2)
    script.batch(1)
    (ahead,) = script.demand("s2", num_groups=1, version=1)
    assert script.deliver("s2", ahead, 0, version=1).outcome == "accepted"
    assert script.deliver("s2", ahead, 1, version=2).outcome == "rejected"
    assert script.coordinator.counts["rejected:version"] == 1
