"""A run is given other reward endpoints while it goes on: who is told, who is leased, what counts, what is kept."""

import json
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import SettingsError
from protocol.settings.reward_sets import REWARD_SETS, RewardSet, changing_sets, new_set, read_sets, write_sets
from protocol.settings.rewards import RewardsSettings
from protocol.wire import messages as m
from tests.learner.coordinator.coordinator_script import Script, settings_of


def give(script: Script, *names: str, **more: Any) -> RewardSet:
    """Give the run another set, as the command does, and have the coordinator look."""
    endpoints = [{"name": name, "url": f"http://127.0.0.1:1/{name}"} for name in names]
    with changing_sets(script.folder):
        sets = read_sets(script.folder)
        wanted = RewardsSettings.model_validate({"endpoints": endpoints, **more})
        one = new_set(wanted, sets[-1].number + 1, "command")
        write_sets(script.folder, [*sets, one])
    script.advance(1.1)
    return one


def test_servers_are_told_a_new_set_and_leased_nothing_until_they_score_by_it(script: Script) -> None:
    script.demand(num_groups=0)
    given = give(script, "new")
    (told,) = script.take("s1", m.Rewards)
    assert (told.reward_set, RewardSet.model_validate_json(told.scoring)) == (2, given)
    assert script.demand(num_groups=2) == []
    assert len(script.demand(num_groups=2, reward_set=2)) == 2


def test_a_server_that_comes_later_is_told_until_it_scores_by_the_set_in_force(script: Script) -> None:
    give(script, "new")
    for _ in range(2):  # the message may be lost
        script.demand("s2")
        script.advance(1.1)
        assert [told.reward_set for told in script.take("s2", m.Rewards)] == [2]
    script.demand("s2", reward_set=2)
    assert script.take("s2", m.Rewards) == []


def test_a_server_that_cannot_use_the_set_is_named_with_its_reason_and_gets_no_leases(script: Script) -> None:
    give(script, "new")
    for _ in range(3):
        assert script.demand(num_groups=2, reward_problem="the variable KEY is not set") == []
    news = [text for text in script.coordinator.status().news if "s1" in text]
    assert news == ["s1 cannot use reward set 2, and gets no leases: the variable KEY is not set"]


def test_samples_of_an_older_set_go_back_when_one_of_a_newer_set_comes(script: Script) -> None:
    (lease,) = script.demand(num_groups=1)
    script.deliver("s1", lease, 0, reward=1.0)
    give(script, "new")
    script.take("s1", m.Rewards)
    newer = script.trajectory("s1", lease, 1, reward_set=2)
    script.tell("s1", m.TrajectoryDone(**script.stamp, facts=newer.facts), newer.to_buffers())
    acks = [(ack.sample_index, ack.outcome) for ack in script.take("s1", m.Ack)]
    assert acks == [(0, "unknown"), (1, "accepted")]
    (again,) = script.demand(num_groups=1, reward_set=2)
    assert (again.group, again.sample_indices, again.attempt) == (lease.group, [0], 2)
    assert script.rows("SELECT sample_index, reward_set FROM trajectories") == [(1, 2)]
    assert script.rows("SELECT sample_index, attempt, reason FROM waste") == [(0, 1, "reward_set")]
    assert script.deliver("s1", again, 0, reward_set=2).outcome == "accepted"
    assert script.states() == {"ready": 1}
    assert script.rows("SELECT COUNT(*) FROM failures") == [(0,)]


def test_a_sample_of_an_older_set_that_comes_after_one_of_a_newer_set_is_made_again(script: Script) -> None:
    (lease,) = script.demand(num_groups=1)
    give(script, "new")
    assert script.deliver("s1", lease, 1, reward_set=2).outcome == "accepted"
    assert script.deliver("s1", lease, 0).outcome == "unknown"
    (again,) = script.demand(num_groups=1, reward_set=2)
    assert (again.group, again.sample_indices) == (lease.group, [0])
    assert script.coordinator.counts["unused:reward_set"] == 1


def test_a_group_that_an_older_set_scored_whole_counts(script: Script) -> None:
    (lease,) = script.demand(num_groups=1)
    script.deliver("s1", lease, 0)
    give(script, "new")
    assert script.deliver("s1", lease, 1).outcome == "accepted"
    assert script.states() == {"ready": 1}


def test_answers_of_an_evaluation_are_by_one_set_for_each_prompt_and_carry_it(tmp_path: Path) -> None:
    evaluation = {"every_steps": 3, "num_prompts": 1, "samples": 1}
    script = Script(tmp_path, settings_of(eval=evaluation, data={"eval": "held_out.jsonl"}), num_held_out=1)
    (lease,) = (lease for lease in script.demand() if lease.kind == "eval")
    script.deliver("s1", lease, 0)
    give(script, "new")
    newer = script.trajectory("s1", lease, 1, reward_set=2)
    script.tell("s1", m.TrajectoryDone(**script.stamp, facts=newer.facts), newer.to_buffers())
    (again,) = (lease for lease in script.demand(reward_set=2) if lease.kind == "eval")
    assert again.sample_indices == [0]
    script.take("s1", m.Ack)
    script.deliver("s1", again, 0, reward_set=2)
    script.advance()
    answers = [json.loads(line) for line in (tmp_path / "evaluations.jsonl").read_text().splitlines()]
    assert [answer["reward_set"] for answer in answers] == [2, 2]


def test_a_sample_of_a_set_that_does_not_exist_is_refused(script: Script) -> None:
    (lease,) = script.demand(num_groups=1)
    ack = script.deliver("s1", lease, 0, reward_set=7)
    assert (ack.outcome, ack.detail) == ("rejected", "$.facts.reward_set: is 7, the newest is 1")


def test_a_step_says_by_which_set_its_newest_samples_were_scored(script: Script) -> None:
    script.train(1)
    give(script, "new")
    for lease in script.demand(version=1, reward_set=2):
        for index in lease.sample_indices:
            script.deliver("s1", lease, index, version=1, reward_set=2, reward_parts={"new": 0.5})
    for step in (2, 3):  # step 2 trains what was ready before the change
        script.batch(step)
        script.step(step, version=step)
    assert [line["reward_set"] for line in script.metrics()] == [1, 1, 2]
    assert script.metrics()[2]["reward/new"] == 0.5


def test_the_last_set_stays_in_force_in_the_next_start_which_says_so(script: Script) -> None:
    give(script, "new", combine="mean")
    resumed = script.resume(step=0)
    status = resumed.coordinator.status()
    assert status.reward_set == 2
    assert status.news[0].startswith("Rewards: set 2 (new; mean; by rewards.endpoints, ")
    assert resumed.demand() == []
    assert [told.reward_set for told in resumed.take("s1", m.Rewards)] == [2]


def test_a_start_with_other_endpoints_in_its_settings_goes_by_these(script: Script) -> None:
    give(script, "new")
    resumed = script.resume(step=0, rewards={"endpoints": [{"name": "own", "url": "http://127.0.0.1:1/own"}]})
    assert resumed.coordinator.status().reward_set == 3


def test_a_set_that_contradicts_the_settings_is_told_and_not_used(tmp_path: Path) -> None:
    endpoint = {"name": "em", "url": "http://127.0.0.1:1/em"}
    script = Script(
        tmp_path,
        settings_of(filter={"dynamic_sampling": True, "score": "em"}, rewards={"endpoints": [endpoint]}),
    )
    give(script, "new")
    status = script.coordinator.status()
    assert status.reward_set == 1
    assert "set 1 stays in force: settings: filter.score = em is none of rewards.endpoints (new)" in status.news[0]
    with pytest.raises(SettingsError, match=r"This is of reward set 2 in .*rewards\.json: give another one by"):
        script.resume(step=0, filter={"dynamic_sampling": True, "score": "em"}, rewards={"endpoints": [endpoint]})


def test_a_file_that_was_spoilt_by_hand_changes_nothing_and_is_told_once(script: Script) -> None:
    (script.folder / REWARD_SETS).write_text("{")
    script.advance(1.1)
    script.advance(1.1)
    assert [text.partition(":")[0] for text in script.coordinator.status().news] == ["Rewards"]
    assert len(script.demand(num_groups=2)) == 2


def test_every_set_is_in_the_ledger(script: Script) -> None:
    give(script, "new")
    assert script.rows("SELECT number FROM reward_sets") == [(1,), (2,)]
    assert script.rows("SELECT kind FROM events") == [("rewards",)]
