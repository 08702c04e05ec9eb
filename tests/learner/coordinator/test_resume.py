"""The next start of a run on the ledger of the one before."""

from pathlib import Path

from tests.learner.coordinator.coordinator_script import Script, settings_of


def test_resumed_run_leases_unfinished_prompts_first_and_none_that_was_trained(script: Script) -> None:
    leases = script.demand()
    for lease in leases[:3]:
        script.finish("s1", lease)
    trained = {facts.group for facts in script.batch(1).facts}
    script.step(1, version=1)
    later = script.demand(version=1)
    out = [lease.group for lease in (*leases, *later) if lease.group not in trained]
    resumed = script.resume(step=1)
    again = resumed.demand(version=1)
    assert resumed.coordinator.incarnation == 2
    assert [lease.group for lease in again] == out
    assert [lease.attempt for lease in again] == [2] * len(out)
    for lease in again:
        assert resumed.finish("s1", lease, version=1) == ["accepted", "accepted"]
    for step in (2, 3):
        resumed.batch(step)
        resumed.step(step, version=step)
        assert resumed.demand(version=step) == []  # the steps that are left have their groups
    assert resumed.states() == {"trained": 6}


def test_resumed_group_is_not_too_old_at_a_late_step(tmp_path: Path) -> None:
    """It once kept version 0 and was dropped and leased again at every turn."""
    script = Script(tmp_path, settings_of(run={"max_steps": 20}))
    script.demand()
    resumed = script.resume(step=10, run={"max_steps": 20})
    leases = resumed.demand(version=10)
    resumed.advance()
    assert len(leases) == 4
    assert resumed.demand(version=10) == []
    assert resumed.coordinator.counts["dropped:stale"] == 0


def test_step_does_not_wait_for_resumed_groups_that_nobody_has_begun(tmp_path: Path) -> None:
    script = Script(tmp_path, settings_of(run={"max_steps": 20}))
    script.demand()
    resumed = script.resume(step=10, run={"max_steps": 20})
    leases = resumed.demand(num_groups=2, version=10)
    for lease in leases:
        resumed.finish("s1", lease, version=10)
    assert {facts.group for facts in resumed.batch(11).facts} == {lease.group for lease in leases}


def test_resumed_run_knows_that_a_step_was_not_applied(script: Script) -> None:
    script.demand_and_finish(num_groups=2)
    script.batch(1)
    script.step(1, version=0, is_applied=False, detail="loss is nan")
    resumed = script.resume(step=1)
    assert (resumed.coordinator.step, resumed.coordinator.policy_version) == (1, 0)
    assert len(resumed.demand(version=0)) == 4


def test_result_that_its_server_kept_is_used_by_the_next_start(script: Script) -> None:
    (lease,) = script.demand(num_groups=1)
    script.deliver("s1", lease, 0)
    resumed = script.resume(step=0)
    assert resumed.deliver("s1", lease, 0).outcome == "accepted"
    (again, *_) = resumed.demand("s2")
    assert (again.group, again.sample_indices) == (lease.group, [1])


def test_result_of_weights_that_the_checkpoint_did_not_have_is_not_used(script: Script) -> None:
    leases = script.demand()
    for lease in leases[:2]:
        script.finish("s1", lease)
    script.batch(1)
    script.step(1, version=1)
    resumed = script.resume(step=1)
    assert resumed.deliver("s1", leases[2], 0, version=2).outcome == "unknown"
    assert resumed.deliver("s1", leases[2], 0, version=1).outcome == "accepted"
    assert resumed.coordinator.counts["unused:lineage"] == 1
    assert resumed.rows("SELECT reason, num_tokens FROM waste") == [("lineage", 2)]


def test_failures_of_an_earlier_start_count_towards_a_dead_letter(script: Script) -> None:
    (lease,) = script.demand(num_groups=1)
    script.fail("s1", lease, 0)
    (again,) = script.demand(num_groups=1)
    script.fail("s1", again, 0)
    resumed = script.resume(step=0)
    (last, *_) = resumed.demand()
    assert last.group == lease.group
    resumed.fail("s1", last, 0)
    assert resumed.rows("SELECT \"group\" FROM prompts WHERE state = 'skipped'") == [(lease.group,)]


def test_resumed_run_skips_a_prompt_that_the_data_set_no_longer_holds(script: Script) -> None:
    script.demand(num_groups=4)
    script.ledger.close()
    resumed = Script(script.folder, num_prompts=1)
    resumed.demand()
    reasons = resumed.rows("SELECT DISTINCT reason FROM prompts WHERE state = 'skipped'")
    assert reasons == [("the data set no longer holds this prompt",)]
