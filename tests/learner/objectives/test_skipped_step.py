"""What a step that is not applied leaves as it was: the adaptive KL's coefficient and the rewards' moments."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from learner.models.roles import Roles
from learner.models.step_result import LossFunction, StepResult, Sums
from learner.objectives.policy_gradient import PolicyGradient, StepOutcome
from learner.packing.micro_batch import MicroBatch
from protocol.settings.settings import Settings
from tests.learner.objectives.slow_policy_gradient import batch_of, trajectories

BEFORE = {"kl_coefficient": 0.3, "reward_count": 9.0, "reward_mean": 0.5, "reward_squares": 2.0}


class ScriptedPolicy:
    """A policy whose updates are applied or not as the script says; its logprobs are 0.5 below the reference's."""

    def __init__(self, is_applied: Sequence[bool]) -> None:
        self.left = list(is_applied)

    def step(self, micro_batches: Sequence[MicroBatch], loss: LossFunction, global_weight: float) -> StepResult:
        sums: Sums = {}
        for each in micro_batches:
            logprobs = torch.full((each.num_model_tokens,), -1.5)
            of_each = loss(logprobs, torch.zeros_like(logprobs), each)[1]
            sums = {key: sums.get(key, torch.zeros(())) + value for key, value in of_each.items()}
        if is_applied := self.left.pop(0):
            return StepResult(True, 0.0, 1.0, {key: float(value) for key, value in sums.items()})
        return StepResult(is_applied, float("nan"), float("nan"), dict.fromkeys(sums, float("nan")))


class ScriptedReference:
    def in_use(self) -> Any:
        return nullcontext()

    def logprobs(self, micro_batch: MicroBatch) -> Tensor:
        return torch.full((micro_batch.num_model_tokens,), -1.0)


def take(*is_applied: bool, num_epochs: int = 1) -> tuple[StepOutcome, dict[str, float]]:
    """Return what a step did, and what is remembered after it."""
    settings = Settings.model_validate(
        {
            "learner": {"num_epochs": num_epochs},
            "kl": {"coefficient": 0.1, "target": 0.01, "horizon": 90.0, "form": "k2"},
            "rewards": {"normalize": True},
        }
    )
    memory = dict(BEFORE)
    roles = Roles(cast(Any, ScriptedPolicy(is_applied)), reference=cast(Any, ScriptedReference()), memory=memory)
    made = trajectories()
    batch = batch_of(made, [list(range(9))], list(range(9)))
    return PolicyGradient(roles, settings, lambda sums: sums).take_step(batch, dict(enumerate(made)), 4), memory


def test_step_that_is_applied_moves_the_coefficient_and_the_moments() -> None:
    outcome, memory = take(True)
    assert outcome.applied
    assert memory["kl_coefficient"] == pytest.approx(0.3 * 1.02)
    assert memory["reward_count"] == 18.0


def test_step_of_which_nothing_is_applied_is_forgotten() -> None:
    outcome, memory = take(False)
    assert not outcome.applied
    assert memory == BEFORE


def test_first_update_that_is_not_finite_leaves_the_coefficient_and_the_step_is_applied() -> None:
    outcome, memory = take(False, True, num_epochs=2)
    assert outcome.applied
    assert memory["kl_coefficient"] == BEFORE["kl_coefficient"]
    assert memory["reward_count"] == 18.0
