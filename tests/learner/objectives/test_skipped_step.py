"""What a step that is not applied leaves as it was: the adaptive KL's coefficient, the rewards' moments, the critic."""

import zlib
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from learner.models.critic import ValueLoss
from learner.models.gradient import LossFunction, StepResult, Sums
from learner.models.micro_batch import MicroBatch
from learner.models.policy import PolicyEngine
from learner.models.reference import ReferenceModel
from learner.models.roles import Roles
from learner.objectives.policy_gradient import PolicyGradient, StepOutcome
from protocol.settings.settings import Settings
from tests.learner.objectives.slow_policy_gradient import batch_of, trajectories

# Reward endpoints as the checkpoint names them: the service of the cluster.
SOURCE = float(zlib.crc32(Settings().rewards.reward_source("single_turn").encode()))
BEFORE = {
    **{"kl_coefficient": 0.3, "kl_coefficient_of_settings": 0.1},
    **{"reward_count": 9.0, "reward_mean": 0.5, "reward_squares": 2.0},
    "reward_source": SOURCE,
}


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


class ScriptedCritic:
    """A critic whose updates are applied or not as the script says; its values are 0."""

    def __init__(self, is_applied: Sequence[bool]) -> None:
        self.left = list(is_applied)

    def values(self, micro_batch: MicroBatch) -> Tensor:
        return torch.zeros(micro_batch.num_model_tokens)

    def step(self, micro_batches: Sequence[MicroBatch], loss: ValueLoss, global_weight: float) -> StepResult:
        sums: dict[str, float] = {}
        for each in micro_batches:
            of_each = loss(torch.zeros(each.num_model_tokens), each)[1]
            sums = {key: sums.get(key, 0.0) + float(value) for key, value in of_each.items()}
        is_applied = self.left.pop(0)
        return StepResult(is_applied, 1.0 if is_applied else float("nan"), 1.0, sums)


class ScriptedReference:
    """A reference that cannot be refreshed."""

    def in_use(self) -> Any:
        return nullcontext()

    def logprobs(self, micro_batch: MicroBatch) -> Tensor:
        return torch.full((micro_batch.num_model_tokens,), -1.0)


class CountedReference(ScriptedReference, ReferenceModel):
    """A reference that counts its refreshes."""

    def __init__(self) -> None:
        self.num_refreshes = 0

    def refresh(self, policy: PolicyEngine) -> None:
        self.num_refreshes += 1


def take(
    *is_applied: bool,
    num_epochs: int = 1,
    critic: ScriptedCritic | None = None,
    warmup_steps: int = 0,
    reference: ScriptedReference | None = None,
    refresh_every_steps: int = 0,
) -> tuple[StepOutcome, dict[str, float]]:
    """Return what a step did, and what is remembered after it. is_applied: of the policy's updates."""
    settings = Settings.model_validate(
        {
            "learner": {"num_epochs": num_epochs, "advantage": "rloo" if critic is None else "gae"},
            "critic": {} if critic is None else {"warmup_steps": warmup_steps},
            "kl": {"coefficient": 0.1, "target": 0.01, "horizon": 90.0, "form": "k2"},
            "rewards": {"normalize": True},
            "reference": {"refresh_every_steps": refresh_every_steps},
        }
    )
    memory = dict(BEFORE)
    of_kl = cast(Any, reference or ScriptedReference())
    roles = Roles(cast(Any, ScriptedPolicy(is_applied)), cast(Any, critic), of_kl, memory)
    made = trajectories()
    batch = batch_of(made, [list(range(9))], list(range(9)))
    return PolicyGradient(roles, settings, lambda sums: sums).take_step(batch, dict(enumerate(made)), 4), memory


@pytest.mark.parametrize("earlier", [{"reward_source": 7.0}, {}])  # a checkpoint of 0.1.0 names no endpoints
def test_moments_start_again_unless_the_same_endpoints_decided_the_reward(
    earlier: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(BEFORE, "reward_source")
    for name, value in earlier.items():
        monkeypatch.setitem(BEFORE, name, value)
    _, memory = take(True)
    assert memory["reward_count"] == 9.0


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


def test_critic_stands_still_with_a_policy_of_which_nothing_is_applied() -> None:
    critic = ScriptedCritic([True, True])
    outcome, memory = take(False, False, num_epochs=2, critic=critic)
    assert not outcome.applied
    assert outcome.detail == "non-finite loss or gradient in 2 of 2 updates (loss nan, norm nan)"
    assert len(critic.left) == 2
    assert "critic/loss" not in outcome.metrics
    assert memory == BEFORE


def test_step_whose_critic_alone_is_refused_is_applied_and_its_line_says_so() -> None:
    outcome, memory = take(True, critic=ScriptedCritic([False]))
    assert outcome.applied
    assert (outcome.metrics["policy/num_updates"], outcome.metrics["critic/num_updates"]) == (1, 0)
    assert memory["reward_count"] == 18.0


@pytest.mark.parametrize("is_applied", [True, False])
def test_while_the_critic_warms_up_the_step_is_its(is_applied: bool) -> None:
    critic = ScriptedCritic([is_applied])
    outcome, _ = take(critic=critic, warmup_steps=1)
    assert outcome.applied == is_applied
    assert critic.left == []


@pytest.mark.parametrize(("every", "num_refreshes"), [(0, 0), (1, 1), (2, 0)])
def test_reference_is_refreshed_at_multiples_of_its_steps(every: int, num_refreshes: int) -> None:
    reference = CountedReference()
    take(True, reference=reference, refresh_every_steps=every)
    assert reference.num_refreshes == num_refreshes


def test_base_of_adapters_is_never_refreshed() -> None:
    outcome, _ = take(True, reference=ScriptedReference(), refresh_every_steps=1)
    assert outcome.applied
