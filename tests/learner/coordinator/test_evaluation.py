"""An evaluation between its start and its means, leased beside training."""

from pathlib import Path

import pytest

from protocol.wire import messages as m
from tests.learner.coordinator.coordinator_script import Script, settings_of


@pytest.fixture
def evaluating(tmp_path: Path) -> Script:
    settings = settings_of(eval={"every_steps": 1, "num_prompts": 2, "samples": 2}, data={"eval": "held_out.jsonl"})
    script = Script(tmp_path, settings, num_held_out=3)
    script.tell("rank-0", m.Evaluate(**script.stamp, step=0))
    assert script.take("rank-0", m.Done) == [m.Done(**script.stamp)]
    return script


def poll(script: Script) -> m.Message:
    script.tell("rank-0", m.EvalPoll(**script.stamp, step=0))
    (answer,) = script.take("rank-0", m.Message)
    return answer


def test_evaluation_is_leased_before_training_and_takes_no_slot(evaluating: Script) -> None:
    leases = evaluating.demand()
    assert [lease.kind for lease in leases] == ["eval", "eval", "train", "train", "train", "train"]
    assert [(lease.sample_indices, lease.greedy_indices) for lease in leases[:2]] == [([0, 1, 2], [2])] * 2


def test_evaluation_ends_with_its_means_and_a_line_of_its_own(evaluating: Script) -> None:
    first, second = evaluating.demand(num_groups=2)
    for index, reward in enumerate((1.0, 0.0, 1.0)):
        evaluating.deliver("s1", first, index, reward=reward)
    assert poll(evaluating) == m.Wait(**evaluating.stamp, detail="evaluation: 1 of 2 prompts are back")
    evaluating.finish("s1", second, reward=0.5)
    result = poll(evaluating)
    assert result == m.EvalResult(
        **evaluating.stamp,
        step=0,
        metrics={"eval_policy_version": 0, "eval_failed": 0, "eval_reward": 0.5, "eval_reward_greedy": 0.75},
    )
    (line,) = evaluating.metrics()
    assert (line["step"], line["eval_reward"], line["eval_reward_greedy"]) == (0, 0.5, 0.75)


def test_evaluation_ends_without_a_prompt_that_failed_three_times(evaluating: Script) -> None:
    lease, other = evaluating.demand(num_groups=2)
    for _ in range(2):
        evaluating.fail("s1", lease, 0)
        (lease,) = evaluating.demand(num_groups=1)
        assert lease.kind == "eval"
    evaluating.fail("s1", lease, 0)
    evaluating.finish("s1", other, reward=1.0)
    result = poll(evaluating)
    assert isinstance(result, m.EvalResult)
    assert result.metrics == {
        "eval_policy_version": 0,
        "eval_failed": 1,
        "eval_reward": 1.0,
        "eval_reward_greedy": 1.0,
    }


def test_learner_that_waits_for_an_evaluation_pushes_again_when_the_only_server_is_back(evaluating: Script) -> None:
    evaluating.tell("s1", m.Hello(**evaluating.stamp, server="s1", policy_version=None))
    evaluating.advance()
    evaluating.advance(2.0)
    assert poll(evaluating) == m.Wait(**evaluating.stamp, detail="evaluation: 0 of 2 prompts are back")
    evaluating.advance(2.0)
    assert poll(evaluating) == m.PushAgain(**evaluating.stamp, step=0)
    assert isinstance(poll(evaluating), m.Wait)  # that push is given its time


def test_evaluation_lease_of_a_silent_server_goes_out_again(evaluating: Script) -> None:
    leases = evaluating.demand("s1", num_groups=2)
    evaluating.advance(101.0)
    assert [lease.group for lease in evaluating.demand("s2", num_groups=2)] == [lease.group for lease in leases]


def test_evaluation_group_that_came_back_late_is_not_leased_again(evaluating: Script) -> None:
    lease, _ = evaluating.demand("s1", num_groups=2)
    evaluating.advance(101.0)
    evaluating.finish("s1", lease)
    assert lease.group not in {again.group for again in evaluating.demand("s2")}
