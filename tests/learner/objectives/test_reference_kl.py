"""Which coefficient the KL to the reference has: the settings', or what a target made of it."""

import math

import pytest

from learner.objectives.advantages import ReferenceKl
from protocol.settings.learner import KlSettings


def test_target_moves_the_coefficient_which_a_later_start_goes_on_with() -> None:
    memory: dict[str, float] = {}
    ReferenceKl(KlSettings(coefficient=0.1, target=1.0, horizon=1000.0), memory).follow(5.0, num_trajectories=500)
    assert memory["kl_coefficient"] == 0.1 * 1.1
    assert ReferenceKl(KlSettings(coefficient=0.1, target=1.0), memory).coefficient == 0.1 * 1.1
    without = ReferenceKl(KlSettings(coefficient=0.1), memory)
    assert without.coefficient == 0.1
    without.follow(5.0, num_trajectories=500)
    assert "kl_coefficient" not in memory


def test_other_coefficient_of_a_resume_replaces_what_the_target_made_of_the_earlier_one() -> None:
    memory: dict[str, float] = {}
    ReferenceKl(KlSettings(coefficient=0.1, target=1.0, horizon=1000.0), memory).follow(5.0, num_trajectories=500)
    resumed = ReferenceKl(KlSettings(coefficient=0.5, target=1.0, horizon=1000.0), memory)
    assert resumed.coefficient == 0.5
    resumed.follow(5.0, num_trajectories=500)
    assert resumed.coefficient == 0.5 * 1.1
    of_unknown = ReferenceKl(KlSettings(coefficient=0.5, target=1.0), {"kl_coefficient": 0.3})  # of version 0.1.0
    assert of_unknown.coefficient == 0.5


@pytest.mark.parametrize("kl", [math.nan, math.inf, -math.inf])
def test_kl_that_is_not_finite_leaves_the_coefficient(kl: float) -> None:
    memory = {"kl_coefficient": 0.3}
    ReferenceKl(KlSettings(coefficient=0.1, target=1.0, horizon=1000.0), memory).follow(kl, num_trajectories=500)
    assert memory == {"kl_coefficient": 0.3}
