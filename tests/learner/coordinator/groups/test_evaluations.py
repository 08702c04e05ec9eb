"""An evaluation: which groups it leases, and the figures and answers it ends with."""

from typing import Any

from learner.coordinator.groups.eval_scores import HeldOutSet
from learner.coordinator.groups.evaluations import Evaluations, EvaluationSchedule
from learner.coordinator.groups.group import Group
from learner.data.prompts import Prompt
from learner.data.text_decoder import TextDecoder
from tests.protocol.wire.examples import make_trajectory

PROMPTS = [Prompt("aa", "a?", "A", {"data_source": "easy/one"}), Prompt("bb", "b?", "B", {"data_source": "hard"})]
PLAIN = [Prompt("aa", "a?", "A", {}), Prompt("bb", "b?", "B", {})]


def begun(*sets: HeldOutSet) -> tuple[Evaluations, list[Group]]:
    groups: list[Group] = []
    evaluations = Evaluations(sets, groups.extend, TextDecoder())
    evaluations.begin(5, 4)
    return evaluations, groups


def deliver(evaluations: Evaluations, group: Group, *rewards: float, version: int = 4, **facts: Any) -> None:
    """Deliver a group's samples, the last of them greedy."""
    for index, reward in enumerate(rewards):
        is_greedy = index == len(rewards) - 1
        of_index = {name: values[index] for name, values in facts.items()}
        group.receive(
            make_trajectory(group.name, index, "s1", version, reward, kind="eval", is_greedy=is_greedy, **of_index)
        )
    evaluations.on_closed(group, None)


def test_evaluation_of_no_prompts_is_done() -> None:
    evaluations, _ = begun(HeldOutSet([], 2))
    metrics, answers = evaluations.take_result()
    assert metrics == {"eval/step": 5, "eval/policy_version": 4, "eval/failed": 0, "eval/held_out/num_prompts": 0}
    assert answers == []


def test_metrics_are_means_of_sampled_and_of_greedy_rewards_apart() -> None:
    evaluations, groups = begun(HeldOutSet(PLAIN, 2))
    for group, rewards in zip(groups, ((1.0, 0.0, 1.0), (0.5, 0.5, 0.0)), strict=True):
        deliver(evaluations, group, *rewards)
    metrics, _ = evaluations.take_result()
    assert {key: value for key, value in metrics.items() if key.count("/") == 1} == {
        "eval/step": 5,
        "eval/policy_version": 4,
        "eval/failed": 0,
        "eval/version_min": 4,
        "eval/version_max": 4,
    }
    assert {key.removeprefix("eval/held_out/"): value for key, value in metrics.items() if key.count("/") > 1} == {
        "num_prompts": 2,
        "reward": 0.5,
        "reward_error": 0.0,
        "greedy": 0.5,
        "greedy_error": 0.5,
        "pass@1": 0.25,
        "pass@2": 0.5,
    }
    assert evaluations.take_result() == ({}, [])


def test_every_set_has_its_samples_temperature_and_figures() -> None:
    other = HeldOutSet(PLAIN[:1], 1, name="aime", temperature=0.25)
    evaluations, groups = begun(HeldOutSet(PROMPTS, 2), other)
    assert [(g.name, g.temperature, g.num_samples) for g in groups] == [
        ("eval-5-aa", None, 3),
        ("eval-5-bb", None, 3),
        ("eval-5-aime:aa", 0.25, 2),
    ]
    for group, rewards in zip(groups, ((1.0, 1.0, 1.0), (0.0, 0.0, 0.0), (0.25, 0.75)), strict=True):
        deliver(evaluations, group, *rewards)
    metrics, _ = evaluations.take_result()
    assert metrics["eval/held_out/reward"] == 0.5
    assert (metrics["eval/aime/reward"], metrics["eval/aime/greedy"]) == (0.25, 0.75)
    assert "eval/aime/reward_error" not in metrics  # of one prompt there is none
    assert (metrics["eval/held_out/easy_one/reward"], metrics["eval/held_out/hard/reward"]) == (1.0, 0.0)


def test_answers_carry_their_texts_their_reward_and_the_versions_that_wrote_them() -> None:
    evaluations, (group,) = begun(HeldOutSet(PROMPTS[:1], 1))
    deliver(evaluations, group, 1.0, 0.5, version=3, answer=("paris", ""))
    metrics, (first, second) = evaluations.take_result()
    assert (first["set"], first["uid"], first["sample"], first["is_greedy"]) == ("held_out", "aa", 0, False)
    assert (first["answer"], first["reward"], first["oldest_version"], first["newest_version"]) == ("paris", 1.0, 3, 3)
    assert (second["answer"], second["is_greedy"], second["data_source"]) == ("", True, "easy_one")
    assert (first["prompt"], first["response"], first["label"]) == ("1 2 ", "3 4 ", "A")
    assert (metrics["eval/policy_version"], metrics["eval/version_min"]) == (4, 3)


def test_a_pinned_evaluation_is_in_the_line_of_its_own_step() -> None:
    assert [EvaluationSchedule(25, 60, is_pinned=True).reported_by(step) for step in (0, 25, 50, 60)] == [0, 25, 50, 60]
    assert EvaluationSchedule(25, 60).reported_by(25) == 49


def test_evaluation_before_the_first_step_can_be_left_out() -> None:
    assert [EvaluationSchedule(2, 3, has_first=has_first).is_due(0) for has_first in (True, False)] == [True, False]
    assert [step for step in range(4) if EvaluationSchedule(2, 3, has_first=False).is_due(step)] == [2, 3]
