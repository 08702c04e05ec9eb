"""An evaluation: which groups it leases, and the means it ends with."""

from learner.coordinator.groups.evaluations import Evaluations, start_evaluation
from learner.data.prompts import Prompt
from tests.protocol.wire.examples import make_trajectory

PROMPTS = [Prompt("aa", "a?", "A", {}), Prompt("bb", "b?", "B", {})]


def test_evaluation_leases_samples_and_one_greedy_trajectory_of_each_prompt() -> None:
    evaluation = start_evaluation(5, 4, PROMPTS, num_samples=2)
    assert [(g.name, g.num_samples, g.greedy_indices, g.kind) for g in evaluation.to_lease] == [
        ("eval-5-aa", 3, frozenset({2}), "eval"),
        ("eval-5-bb", 3, frozenset({2}), "eval"),
    ]
    assert not evaluation.is_done


def test_evaluation_of_no_prompts_is_done() -> None:
    evaluation = start_evaluation(5, 4, [], num_samples=2)
    assert evaluation.is_done
    assert evaluation.metrics() == {"eval_policy_version": 4, "eval_failed": 0}


def test_metrics_are_means_of_sampled_and_of_greedy_rewards_apart() -> None:
    evaluation = start_evaluation(5, 4, PROMPTS, num_samples=2)
    for group, rewards in zip(list(evaluation.to_lease), ((1.0, 0.0, 1.0), (0.5, 0.5, 0.0)), strict=True):
        for index, reward in enumerate(rewards):
            is_greedy = index == 2
            group.receive(make_trajectory(group.name, index, "s1", 4, reward, kind="eval", is_greedy=is_greedy))
        evaluation.close(group)
    assert evaluation.is_done
    assert evaluation.metrics() == {
        "eval_policy_version": 4,
        "eval_failed": 0,
        "eval_reward": 0.5,
        "eval_reward_greedy": 0.5,
    }


def test_a_group_that_failed_is_counted_and_not_scored_as_zero() -> None:
    evaluation = start_evaluation(5, 4, PROMPTS, num_samples=1)
    first, second = list(evaluation.to_lease)
    for index in range(2):
        first.receive(make_trajectory(first.name, index, "s1", 4, 1.0, kind="eval", is_greedy=index == 1))
    evaluation.close(first)
    evaluation.close(second)
    assert evaluation.metrics() == {
        "eval_policy_version": 4,
        "eval_failed": 1,
        "eval_reward": 1.0,
        "eval_reward_greedy": 1.0,
    }


def test_group_that_is_back_or_given_up_while_it_waits_for_another_lease_does_not_go_out() -> None:
    evaluations = Evaluations(PROMPTS, num_samples=1)
    evaluations.begin(5, 4)
    whole, given_up = evaluations.open_groups()
    for group in (whole, given_up):
        assert evaluations.next_group() is group
        evaluations.release(group)
    for index in range(2):
        whole.receive(make_trajectory(whole.name, index, "s1", 4, 1.0, kind="eval", is_greedy=index == 1))
    evaluations.close(given_up)
    assert evaluations.next_group() is None


def test_group_of_an_evaluation_that_is_over_does_not_go_out_again() -> None:
    evaluations = Evaluations(PROMPTS, num_samples=1)
    evaluations.begin(5, 4)
    (first, second), queue = evaluations.open_groups(), []
    evaluations.close(first)
    while (group := evaluations.next_group()) is not None:
        queue.append(group)
    assert queue == [second]
