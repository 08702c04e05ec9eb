"""Steps: which groups they wait for, what each rank is answered, how they are accounted."""

from pathlib import Path

import msgspec

from protocol.wire import messages as m
from tests.learner.coordinator.coordinator_script import Script, settings_of


def test_waiting_learner_hears_which_servers_it_waits_for(script: Script) -> None:
    script.demand("s1", num_groups=1)
    script.demand("s2", num_groups=1)
    assert script.ask(1) == []
    script.advance(1.5)
    assert script.take("rank-0", m.Wait) == [m.Wait(**script.stamp, detail="step 1 waits for 2 groups on s1, s2")]


def test_waiting_learner_hears_where_the_oldest_of_many_groups_are(tmp_path: Path) -> None:
    script = Script(tmp_path, settings_of(learner={"groups_per_step": 70}), num_prompts=140)
    script.demand("s1", num_groups=64)
    script.advance()
    script.demand("s2", num_groups=76)
    script.advance()
    assert script.ask(1) == []
    script.advance(1.5)
    (answer,) = script.take("rank-0", m.Wait)
    assert answer.detail == "step 1 waits for more than 64 groups, the oldest on s1"


def train_without_the_first(script: Script, num_steps: int) -> m.Lease:
    """Train steps of everything but the very first group; returns that group's lease."""
    kept: m.Lease | None = None
    for step in range(1, num_steps + 1):
        for lease in script.demand(version=step - 1):
            if kept is None:
                kept = lease
            else:
                script.finish("s1", lease, version=step - 1)
        script.batch(step)
        script.step(step, version=step)
    assert kept is not None
    return kept


def test_waiting_for_a_slow_group_keeps_the_bound(script: Script) -> None:
    slow = train_without_the_first(script, num_steps=1)
    script.demand_and_finish(version=1)
    assert script.ask(2) == []
    script.finish("s1", slow, version=0)
    assert slow.group in {facts.group for facts in script.take("rank-0", m.Batch)[0].facts}
    script.step(2, version=2)
    assert script.rows("SELECT max(staleness) FROM trajectories") == [(1,)]


def test_dropped_group_is_made_again_on_current_weights_and_trained(tmp_path: Path) -> None:
    script = Script(tmp_path, settings_of(learner={"stale_policy": "drop"}, run={"max_steps": 4}))
    slow = train_without_the_first(script, num_steps=2)
    again = {lease.group: lease for lease in script.demand(version=2)}[slow.group]
    assert (again.attempt, again.sample_indices) == (2, [0, 1])
    assert script.coordinator.counts["dropped:stale"] == 1
    reasons = dict(script.rows('SELECT "group", reason FROM prompts'))
    assert reasons[slow.group] == "too old at policy version 2"
    # What still comes of the first lease is not taken: it would make the group too old once more.
    assert script.finish("s1", slow, version=0) == ["duplicate", "duplicate"]
    assert script.finish("s1", again, version=2) == ["accepted", "accepted"]
    assert dict(script.rows('SELECT "group", state FROM prompts'))[slow.group] == "ready"
    assert script.coordinator.counts["dropped:stale"] == 1


def test_what_is_back_of_a_dropped_group_is_wasted_and_forgotten(tmp_path: Path) -> None:
    script = Script(tmp_path, settings_of(learner={"stale_policy": "drop"}, run={"max_steps": 4}))
    slow, *others = script.demand(num_groups=3)
    script.deliver("s1", slow, 1)
    for step in (1, 2):
        for lease in others:
            script.finish("s1", lease, version=step - 1)
        script.batch(step)
        script.step(step, version=step)
        others = script.demand(version=step, num_groups=2)
    assert script.rows('SELECT "group", sample_index, reason, num_tokens FROM waste') == [(slow.group, 1, "stale", 2)]
    assert script.rows(f"SELECT count(*) FROM trajectories WHERE \"group\" = '{slow.group}'") == [(0,)]  # noqa: S608


def test_rank_that_asks_twice_gets_the_same_share(tmp_path: Path) -> None:
    script = Script(tmp_path, settings_of(learner={"num_ranks": 2}))
    script.demand_and_finish()
    first = script.batch(1, rank=0)
    other = script.batch(1, rank=1)
    assert script.batch(1, rank=0) == first
    assert sorted(i for share in (first, other) for part in share.micro_batches for i in part) == [0, 1, 2, 3]


def test_stepped_of_the_step_before_does_not_end_the_one_under_way(script: Script) -> None:
    script.train(1)
    script.demand_and_finish(version=1)
    script.batch(2)
    script.step(1, version=1)
    assert script.coordinator.step == 1
    assert script.states() == {"trained": 2, "assigned": 2, "ready": 2}


def test_step_that_was_not_applied_skips_its_groups_and_trains_none(script: Script) -> None:
    script.demand_and_finish(num_groups=2)
    script.batch(1)
    script.step(1, version=0, is_applied=False, detail="loss is nan")
    assert (
        script.rows("SELECT state, step, reason FROM prompts") == [("skipped", 1, "step not applied: loss is nan")] * 2
    )
    assert script.rows("SELECT count(*) FROM trajectories WHERE step IS NOT NULL") == [(0,)]
    assert (script.coordinator.step, script.coordinator.policy_version) == (1, 0)
    assert script.coordinator.counts["skipped"] == script.metrics()[0]["data/skipped"] == 2
    assert len(script.demand(version=0)) == 4
    (notice,) = script.coordinator.status().notices
    assert notice.startswith("Step 1 was not applied: loss is nan. This is said once; data/skipped counts such")


def test_operator_hears_once_of_steps_that_were_applied_in_part(tmp_path: Path) -> None:
    script = Script(tmp_path, settings_of(run={"max_steps": 20}), num_prompts=40)
    for step in (1, 2, 3):
        script.demand_and_finish(version=step - 1, num_groups=2)
        script.batch(step)
        script.step(step, version=step, detail="" if step == 1 else f"non-finite loss in 1 of 4 updates ({step})")
    (notice,) = script.coordinator.status().notices
    assert notice.startswith(
        "Step 2 was applied in part, and its prompts count as trained: non-finite loss in 1 of 4 updates (2). "
    )


def test_run_ends_after_five_steps_in_a_row_that_were_not_applied(tmp_path: Path) -> None:
    script = Script(tmp_path, settings_of(run={"max_steps": 20}), num_prompts=40)

    def take(step: int, version: int, *, is_applied: bool) -> str | None:
        script.demand_and_finish(version=version, num_groups=2)
        script.batch(step)
        script.step(step, version=version + is_applied, is_applied=is_applied, detail="" if is_applied else "nan")
        return script.coordinator.status().give_up_reason

    reasons = [take(step, version=0, is_applied=False) for step in range(1, 5)]
    reasons += [take(5, version=0, is_applied=True)]
    reasons += [take(step, version=1, is_applied=False) for step in range(6, 11)]
    assert reasons[:-1] == [None] * 9
    assert str(reasons[-1]).startswith("No step since step 6 was applied: nan. Lower learner.lr, ")
    assert script.coordinator.step == 10


def test_rank_outside_the_run_is_refused(script: Script) -> None:
    assert script.ask(1, rank=1) == [
        m.Refusal(**script.stamp, detail="$.rank: is 1, this run has 1 ranks", reason="rank")
    ]


def test_rank_that_asks_for_a_step_that_is_done_is_refused(script: Script) -> None:
    script.train(1)
    assert script.ask(1) == [m.Refusal(**script.stamp, detail="$.step: is 1, step 1 is done", reason="step")]


def test_stop_lets_the_step_under_way_finish_and_ends_every_rank_at_the_same_step(tmp_path: Path) -> None:
    script = Script(tmp_path, settings_of(learner={"num_ranks": 2}))
    script.demand_and_finish()
    script.batch(1, rank=0)
    script.coordinator.stop_after_step("stopped by the user")
    script.batch(1, rank=1)
    assert script.ask(2, rank=1) == []
    script.step(1, version=1)
    ended = m.RunEnd(**script.stamp, step=2, detail="stopped by the user")
    assert script.take("rank-1", m.RunEnd) == [ended]
    assert script.ask(2, rank=0) == [ended]
    assert script.demand(version=1) == []


def test_metrics_of_a_step_hold_data_learner_and_coordinator_values(script: Script) -> None:
    script.train(1, reward=0.25)
    (line,) = script.metrics()
    expected = {"step": 1, "policy_version": 1, "policy/loss": 0.25, "reward/mean": 0.25, "data/staleness_max": 0}
    assert {name: line[name] for name in expected} == expected
    assert (line["data/window_used"], line["data/skipped"], line["data/retried"]) == (4, 0, 0)


def test_ranks_push_again_together_when_the_only_server_is_back_without_weights(tmp_path: Path) -> None:
    script = Script(tmp_path, settings_of(learner={"num_ranks": 2}))
    script.demand()
    script.coordinator.lose_server("s1", "s1 died")
    script.advance()
    script.advance(10.0)
    script.ask(1, rank=0)
    assert script.ask(1, rank=1) == []  # there is nobody to push to
    script.tell("s1", m.Hello(**script.stamp, server="s1", policy_version=None))
    script.advance()
    script.advance(4.0)
    wait = m.Wait(**script.stamp, detail="step 1 waits for a server with the current weights")
    assert [script.take(f"rank-{rank}", m.Message) for rank in (0, 1)] == [[wait], [wait]]
    assert script.ask(1, rank=0) == []  # the other rank is elsewhere
    again = m.PushAgain(**script.stamp, step=1)
    assert script.ask(1, rank=1) == [again]
    assert script.take("rank-0", m.Message) == [again]


def test_ranks_do_not_push_again_while_a_server_holds_the_weights(script: Script) -> None:
    script.demand("s2", num_groups=1)
    script.tell("s1", m.Hello(**script.stamp, server="s1", policy_version=None))
    script.advance()
    script.advance(10.0)
    assert script.ask(1) == []


def test_batch_names_the_servers_that_its_push_is_to_leave_out(tmp_path: Path) -> None:
    script = Script(tmp_path, settings_of(learner={"groups_per_step": 2, "max_staleness": 1, "num_ranks": 2}))
    script.demand_and_finish(num_groups=2)
    script.demand("s2", num_groups=2)
    script.coordinator.lose_server("s2", "s2 has no connection")
    assert script.batch(1, rank=0).absent == ["s2"]
    script.demand("s2", num_groups=0)
    assert script.batch(1, rank=1).absent == []


def test_push_is_asked_for_when_no_server_has_had_the_weights_for_three_seconds_on_end(script: Script) -> None:
    without = m.Hello(**script.stamp, server="s1", policy_version=None)
    script.tell("s1", without)
    script.advance()
    script.advance(2.0)
    script.demand("s1", num_groups=0, version=0)  # it has them after all
    script.tell("s1", without)
    script.advance()
    script.advance(2.9)
    assert script.ask(1) == []
    script.advance(0.1)
    assert script.take("rank-0", m.Message) == [m.PushAgain(**script.stamp, step=1)]


def test_run_ends_by_its_stop_rule_with_a_sentence_and_its_lines_count_alarms(tmp_path: Path) -> None:
    health = {"patience": 1, "stop_after": 2, "equal_groups": 0.5}
    script = Script(tmp_path, settings_of(run={"max_steps": 9}, health=health))
    script.train(1)
    assert script.coordinator.status().give_up_reason is None
    script.train(2)
    script.advance()
    (ended,) = script.ask(3)
    assert isinstance(ended, m.RunEnd)
    why = script.coordinator.status().give_up_reason
    assert why is not None
    assert why.startswith("Alarms for 2 steps in a row (health.stop_after): 100% of the groups have equal rewards")
    assert [line["health/alarms"] for line in script.metrics()] == [1, 1]


def test_groups_of_a_step_are_assigned_to_it_in_the_ledger(script: Script) -> None:
    script.demand_and_finish()
    script.batch(1)
    assert script.rows("SELECT DISTINCT step FROM prompts WHERE state = 'assigned'") == [(1,)]


# -- steps in parts ----------------------------------------------------------------------------------------------------


def four_a_step(folder: Path, **learner: int) -> Script:
    return Script(folder, settings_of(learner={"groups_per_step": 4, "max_staleness": 0, **learner}))


def test_step_in_parts_begins_with_the_ready_groups_and_its_line_is_of_all(tmp_path: Path) -> None:
    script = four_a_step(tmp_path)
    first, second, third, fourth = script.demand()
    assert script.ask(1, part=0) == []
    script.finish("s1", second, reward=1.0)
    (begun,) = script.take("rank-0", m.Batch)
    assert ({facts.group for facts in begun.facts}, begun.part, begun.is_last) == ({second.group}, 0, False)
    assert script.states() == {"leased": 3, "assigned": 1}
    script.finish("s1", first, reward=0.0)
    script.finish("s1", fourth, reward=0.0)
    further = script.batch(1, part=1)
    assert {facts.group for facts in further.facts} == {first.group, fourth.group}
    assert (further.part, further.is_last, further.planned) == (1, False, [0, 1, 2, 3])
    assert script.ask(1, part=2) == []
    script.advance(1.5)
    assert script.take("rank-0", m.Wait) == [m.Wait(**script.stamp, detail="step 1 waits for 1 groups on s1")]
    script.finish("s1", third, reward=0.0)
    last = script.batch(1, part=2)
    assert (last.part, last.is_last) == (2, True)
    script.step(1, version=1)
    assert script.states() == {"trained": 4}
    (line,) = script.metrics()
    assert (line["reward/mean"], line["data/num_samples"], line["progress/epoch"]) == (0.25, 8, 0.5)
    assert (line["data/window_used"], line["data/num_parts"]) == (4, 3)


def test_parts_leave_out_groups_of_equal_rewards_but_for_the_last_one_of_a_step_of_such_groups(tmp_path: Path) -> None:
    script = Script(tmp_path, settings_of(learner={"groups_per_step": 2, "max_staleness": 0, "equal_groups": "skip"}))
    first, second = script.demand()
    script.finish("s1", first, reward=1.0)
    begun = script.batch(1, part=0)
    assert (len(begun.facts), begun.planned, begun.micro_batches, begun.is_last) == (2, [], [[]], False)
    script.finish("s1", second, reward=1.0)
    last = script.batch(1, part=1)
    assert (last.planned, last.micro_batches, last.is_last) == ([0, 1], [[0, 1]], True)
    script.step(1, version=1)
    (line,) = script.metrics()
    assert (line["reward/equal_group_share"], line["data/num_samples"]) == (1.0, 4)


def test_step_that_is_ready_comes_in_one_part_and_a_rank_that_takes_none_waits(tmp_path: Path) -> None:
    script = four_a_step(tmp_path)
    *others, slow = script.demand()
    for lease in others:
        script.finish("s1", lease)
    assert script.ask(1) == []
    script.finish("s1", slow)
    (whole,) = script.take("rank-0", m.Batch)
    assert (whole.part, whole.is_last, len(whole.facts)) == (msgspec.UNSET, msgspec.UNSET, 8)
    script.step(1, version=1)
    script.demand_and_finish(version=1)
    one = script.batch(2, part=0)
    assert (one.part, one.is_last, len(one.facts)) == (0, True, 8)


def test_every_rank_gets_the_same_parts_and_a_part_again(tmp_path: Path) -> None:
    script = four_a_step(tmp_path, num_ranks=2)
    *others, slow = script.demand()
    script.finish("s1", others[0])
    first = script.batch(1, rank=0, part=0)
    for lease in others[1:]:
        script.finish("s1", lease)
    second = script.batch(1, rank=0, part=1)
    other = script.batch(1, rank=1, part=0)
    assert (other.facts, len(other.micro_batches)) == (first.facts, len(first.micro_batches))
    assert script.batch(1, rank=0, part=1) == second
    assert script.batch(1, rank=1, part=1).facts == second.facts
    script.finish("s1", slow)
    assert script.batch(1, rank=1, part=2).is_last


def test_a_part_has_an_eighth_of_the_groups_or_the_rest(tmp_path: Path) -> None:
    script = Script(tmp_path, settings_of(learner={"groups_per_step": 17, "max_staleness": 0}), num_prompts=40)
    leases = script.demand()
    assert len(leases) == 17
    sizes = []
    assert script.ask(1, part=0) == []
    for lease in leases:
        script.finish("s1", lease)
        for batch in script.take("rank-0", m.Batch):
            sizes.append(len(batch.groups))
            if not batch.is_last:
                assert script.ask(1, part=len(sizes)) == []
    assert sizes == [3, 3, 3, 3, 3, 2]


def test_stop_ends_a_step_that_lacks_groups_and_the_next_start_takes_it_again(tmp_path: Path) -> None:
    learner = {"groups_per_step": 4, "max_staleness": 0, "num_ranks": 2}
    script = Script(tmp_path, settings_of(learner=learner))
    leases = script.demand()
    script.finish("s1", leases[0])
    script.batch(1, rank=0, part=0)
    script.coordinator.stop_after_step("stopped by the user")
    (ended,) = script.ask(1, rank=0, part=1)
    assert isinstance(ended, m.RunEnd)
    assert isinstance(script.batch(1, rank=1, part=0), m.Batch)  # rank 0 waits for it in a collective
    assert script.ask(1, rank=1, part=1) == [ended]
    again = script.resume(0, learner=learner)
    assert {lease.group for lease in again.demand()} == {lease.group for lease in leases}


def test_group_that_is_skipped_while_its_step_runs_is_replaced(tmp_path: Path) -> None:
    script = four_a_step(tmp_path)
    bad, *others = script.demand()
    script.finish("s1", others[0])
    script.batch(1, part=0)
    for number in range(3):
        script.fail("s1", bad, 0)
        if number < 2:
            script.advance(31.0)
            (bad,) = script.demand()
    (new,) = script.demand()
    for lease in (*others[1:], new):
        script.finish("s1", lease)
    assert {facts.group for facts in script.batch(1, part=1).facts} == {x.group for x in (*others[1:], new)}


def test_ranks_push_again_in_the_middle_of_a_step(tmp_path: Path) -> None:
    script = four_a_step(tmp_path)
    leases = script.demand()
    script.finish("s1", leases[0])
    script.batch(1, part=0)
    script.tell("s1", m.Hello(**script.stamp, server="s1", policy_version=None))
    script.advance()
    script.advance(4.0)
    assert script.ask(1, part=1) == [m.PushAgain(**script.stamp, step=1)]
    assert len(script.demand(version=0)) == 3


def test_server_with_weights_of_a_lost_start_gets_no_lease_while_a_step_lacks_groups(tmp_path: Path) -> None:
    script = four_a_step(tmp_path)
    first, *others = script.demand(num_groups=2)
    script.finish("s1", first)
    script.batch(1, part=0)
    assert script.demand("s2", version=1) == []
    for lease in (*others, *script.demand("s2", version=0)):
        script.finish("s2" if lease not in others else "s1", lease)
    assert script.batch(1, part=1).is_last
