"""The figures of an evaluation, against counting every case."""

import statistics
from itertools import combinations

import pytest

from learner.coordinator.groups.eval_scores import (
    ScoredPrompt,
    majority_reward,
    mean_with_error,
    pass_at_k,
    score_set,
)


@pytest.mark.parametrize(("num_samples", "num_solved"), [(1, 0), (1, 1), (4, 0), (4, 1), (4, 4), (6, 2)])
def test_pass_at_k_is_the_share_of_all_draws_with_a_solved_sample(num_samples: int, num_solved: int) -> None:
    solved = [index < num_solved for index in range(num_samples)]
    for k in range(1, num_samples + 1):
        draws = list(combinations(solved, k))
        assert pass_at_k(num_samples, num_solved, k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-12)


def test_error_is_the_standard_error_of_the_mean() -> None:
    values = [0.25, 1.0, 0.0, 0.5, 0.5]
    scores = mean_with_error("reward", values)
    assert scores["reward"] == pytest.approx(statistics.mean(values))
    assert scores["reward_error"] == pytest.approx(statistics.stdev(values) / len(values) ** 0.5)
    assert mean_with_error("reward", [0.5]) == {"reward": 0.5}


@pytest.mark.parametrize(
    ("rewards", "answers", "expected"),
    [
        ((1.0, 0.0, 1.0), ("a", "b", "a"), 1.0),
        ((0.0, 1.0, 0.0), ("a", "b", "a"), 0.0),
        ((1.0, 0.0), ("a", "b"), 0.5),  # two answers with a vote each: either may be taken
        ((1.0, 0.0, 0.0), ("a", None, None), 1.0),  # no answer is not a vote
        ((1.0, 0.0), (None, None), 0.5),
        ((1.0, 0.5, 0.0), ("a", "a", "b"), 0.75),  # the same answer need not have the same reward
    ],
)
def test_majority_takes_the_most_frequent_answer(
    rewards: tuple[float, ...], answers: tuple[str | None, ...], expected: float
) -> None:
    assert majority_reward(rewards, answers) == expected


def test_pass_at_k_is_told_for_powers_of_two_and_the_number_of_samples() -> None:
    scores = score_set([ScoredPrompt("", (1.0,) * 6, 1.0)], solved_at=1.0)
    assert [name for name in scores if name.startswith("pass@")] == ["pass@1", "pass@2", "pass@4", "pass@6"]
    assert not any(name.startswith("majority@") for name in scores)


def test_a_sample_solves_its_prompt_from_the_reward_that_settings_name() -> None:
    prompt = ScoredPrompt("", (0.4, 0.6), 0.0)
    assert score_set([prompt], solved_at=0.5)["pass@1"] == 0.5
    assert score_set([prompt], solved_at=1.0)["pass@1"] == 0.0
