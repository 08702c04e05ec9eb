"""A group's samples: leased, back, failed, made again."""

import numpy as np
import pytest

from learner.coordinator.groups.born_ready import trajectory_of
from learner.coordinator.groups.group import TRANSITIONS, Group, GroupState, LeaseStamp
from learner.data.prompts import Prompt
from learner.data.sft_rows import SftRow
from protocol.wire.trajectory import VersionSpan
from tests.protocol.wire.examples import make_trajectory

PROMPT = Prompt("aa", "Which?", "A", {"hops": 1})


def new_group(num_samples: int = 3) -> Group:
    return Group("e0-aa", PROMPT, "train", 0, 0, num_samples)


def stamp(number: int) -> LeaseStamp:
    return LeaseStamp("r1", 2, seed=7, number=number)


def lease(group: Group, server: str = "s1", version: int = 3, now: float = 0.0) -> list[int]:
    return group.lease_to(server, version, now, stamp(1)).sample_indices


def test_first_lease_holds_every_sample_and_the_prompt() -> None:
    group = new_group()
    message = group.lease_to("s1", 3, 5.0, stamp(4))
    assert (message.group, message.attempt, message.kind, message.seed) == ("e0-aa", 1, "train", 7)
    assert (message.prompt, message.label, message.columns) == ("Which?", "A", {"hops": 1})
    assert (message.sample_indices, message.greedy_indices) == ([0, 1, 2], [])
    assert (message.run_id, message.incarnation) == ("r1", 2)
    assert (message.number, group.leases) == (4, {"s1": (4, 1)})
    assert (group.missing, group.leased_at, group.oldest_version) == ([], 5.0, 3)


def test_lease_names_greedy_samples_among_the_missing_ones() -> None:
    group = Group("eval-1-aa", PROMPT, "eval", -1, -1, 3, frozenset({2}))
    assert group.lease_to("s1", 3, 0.0, stamp(1)).greedy_indices == [2]


def test_group_is_ready_when_every_sample_is_back_and_as_old_as_its_oldest_token() -> None:
    group = new_group()
    lease(group, version=3)
    for index, version in enumerate((5, 4, 6)):
        assert not group.is_ready
        assert group.receive(make_trajectory("e0-aa", index, "s1", version))
    assert group.is_ready
    assert group.oldest_version == 4


def test_lease_of_the_rest_is_as_old_as_what_is_back() -> None:
    group = new_group()
    lease(group, version=3)
    group.receive(make_trajectory("e0-aa", 0, "s1", 3))
    group.take_back_from("s1")
    lease(group, version=5)
    assert group.oldest_version == 3


def test_lease_of_a_group_of_which_nothing_is_left_is_as_young_as_its_server() -> None:
    group = new_group()
    lease(group, version=3)
    group.take_back_from("s1")
    lease(group, version=5)
    assert group.oldest_version == 5


def test_dead_letter_tells_why_a_sample_failed_three_times() -> None:
    group = new_group()
    for number in range(3):
        assert group.dead_letter is None
        lease(group)
        group.fail(1, "s1", "reward", f"50{number}")
    assert group.dead_letter == "sample 1: reward: 500; reward: 501; reward: 502"


def test_failures_of_different_samples_do_not_add_up() -> None:
    group = new_group()
    lease(group)
    for index in range(3):
        group.fail(index, "s1", "retriever", "down")
    assert group.dead_letter is None


def test_deaths_of_its_servers_count_less_than_other_failures() -> None:
    group = new_group()
    for number in range(5):
        assert group.dead_letter is None
        lease(group)
        group.fail(1, "s1", "server", f"s{number} died")
    assert group.dead_letter == "sample 1: " + "; ".join(f"server: s{number} died" for number in range(5))


def test_take_back_returns_the_samples_that_the_server_held() -> None:
    group = new_group()
    lease(group)
    group.receive(make_trajectory("e0-aa", 0, "s1", 3))
    assert group.take_back_from("s2") == []
    assert group.take_back_from("s1") == [1, 2]
    assert group.missing == [1, 2]


def test_restarted_group_takes_no_results_of_earlier_leases() -> None:
    group = new_group(num_samples=1)
    lease(group, version=3)
    group.take_back_from("s1")
    lease(group, version=3)
    group.receive(make_trajectory("e0-aa", 0, "s1", 3, attempt=2))
    group.restart(2)
    lease(group, version=6)
    assert group.oldest_version == 6
    for attempt in (1, 2):
        assert not group.receive(make_trajectory("e0-aa", 0, "s1", 3, attempt=attempt))
    assert group.receive(make_trajectory("e0-aa", 0, "s1", 6, attempt=3))


def test_equal_rewards_are_told_from_others() -> None:
    group = new_group(num_samples=2)
    group.receive(make_trajectory("e0-aa", 0, "s1", 3, reward=0.5))
    group.receive(make_trajectory("e0-aa", 1, "s1", 3, reward=0.5))
    assert group.equal_rewards()
    group.trajectories[1] = make_trajectory("e0-aa", 1, "s1", 3, reward=0.75)
    assert not group.equal_rewards()


def test_group_is_as_old_as_the_oldest_of_what_is_back_before_it_is_ready() -> None:
    group = new_group(num_samples=3)
    group.receive(make_trajectory("e0-aa", 0, "s1", 4))
    group.receive(make_trajectory("e0-aa", 1, "s1", 6))
    assert (group.is_ready, group.oldest_version) == (False, 4)


def test_state_changes_along_the_table_alone() -> None:
    for before in GroupState:
        for after in GroupState:
            group = new_group()
            group.state = before
            if after in TRANSITIONS[before]:
                group.move_to(after)
                assert group.state is after
                continue
            with pytest.raises(ValueError, match=f"e0-aa cannot become {after.value}: it is {before.value}"):
                group.move_to(after)


def test_no_group_is_trained_that_was_not_assigned_and_ends_stay() -> None:
    assert [before for before in GroupState if GroupState.TRAINED in TRANSITIONS[before]] == [GroupState.ASSIGNED]
    assert TRANSITIONS[GroupState.TRAINED] == TRANSITIONS[GroupState.SKIPPED] == ()


def test_learnt_tokens_of_a_row_are_the_samples_policy_tokens() -> None:
    row = SftRow(np.array([5, 6, 7, 8, 9], np.int32), np.array([0.0, 0.5, 1.0, 0.0, 1.0], np.float32), reward=-1.0)
    found = trajectory_of(new_group(), 1, row, version=4, incarnation=2)
    assert found.loss_mask.tolist() == [0, 1, 1, 0, 1]
    assert found.facts.version_spans == [VersionSpan(1, 3, 4), VersionSpan(4, 5, 4)]
    assert (found.facts.num_tokens, found.facts.num_prompt_tokens, found.facts.reward) == (5, 1, -1.0)
