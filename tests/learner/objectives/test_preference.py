"""Learning from pairs: each loss against a slow loop and TRL's numbers, packing, and the first step's closed forms."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from learner.models.micro_batch import MicroBatch
from learner.models.policy import PolicyEngine
from learner.models.reference import ReferenceModel
from learner.models.roles import Roles
from learner.objectives.preference import Preference
from protocol.settings.settings import Settings
from protocol.wire.trajectory import Trajectory
from tests.learner.objectives.slow_policy_gradient import V, batch_of, table, trajectories
from tests.learner.objectives.table_model import TableModel, logprobs_of

pytestmark = pytest.mark.usefixtures("one_rank")

BETA = 0.3


class TableReference:
    """A reference that is a table of logits."""

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits.detach().clone()

    def in_use(self) -> Any:
        return torch.no_grad()

    def logprobs(self, micro_batch: MicroBatch) -> Tensor:
        return logprobs_of(self._logits, micro_batch)


def pairs() -> list[Trajectory]:
    """Return three pairs of answers of different lengths."""
    made = []
    for i, each in enumerate(trajectories()[:6]):
        facts = msgspec.structs.replace(each.facts, group=f"g{i // 2}", sample_index=i % 2, reward=1.0 - 2.0 * (i % 2))
        made.append(replace(each, facts=facts))
    return made


def settings_of(**preference: Any) -> Settings:
    return Settings.model_validate({"objective": "dpo", "preference": {"beta": BETA} | preference})


def take_step(
    logits: Tensor, before: Tensor, micro_batches: list[list[int]], sizes: Sequence[int] = (), **preference: Any
) -> tuple[list[float], dict[str, float]]:
    """Return the losses of the updates and the metrics of one step; logits take the step."""
    made = pairs()
    batch = batch_of(made, micro_batches, group_size=2, sizes=sizes or [len(micro_batches)])
    policy, settings = TableModel(logits), settings_of(**preference)
    roles = Roles(
        cast(PolicyEngine, policy),
        reference=cast(ReferenceModel, TableReference(before)) if settings.preference.has_reference else None,
    )
    outcome = Preference(roles, settings, Path(), lambda sums: sums).take_step(batch, dict(enumerate(made)), 0)
    return policy.losses, outcome.metrics


def slow_logp(logits: Tensor, trajectory: Trajectory) -> tuple[Tensor, int]:
    logprobs, total, num = logits.log_softmax(-1), torch.zeros((), dtype=torch.float64), 0
    for t, is_learnt in enumerate(trajectory.loss_mask):
        if is_learnt:
            total = total + logprobs[int(trajectory.tokens[t - 1]), int(trajectory.tokens[t])]
            num += 1
    return total, num


def slow_loss(
    logits: Tensor,
    before: Tensor,
    *,
    loss: str = "sigmoid",
    label_smoothing: float = 0.0,
    average: bool = False,
    nll_coefficient: float = 0.0,
    gamma: float = 0.5,
) -> Tensor:
    """Return the mean loss of the three pairs, written from the formulas of the papers."""
    total, made = torch.zeros((), dtype=torch.float64), pairs()
    for pair in range(3):
        (chosen, n), (rejected, m) = (slow_logp(logits, made[2 * pair + i]) for i in (0, 1))
        old_chosen, old_rejected = (slow_logp(before, made[2 * pair + i])[0].detach() for i in (0, 1))
        if loss == "orpo":
            odds = [mean - torch.log(1 - mean.exp()) for mean in (chosen / n, rejected / m)]
            total = total - chosen / n - BETA * torch.log(1 / (1 + (odds[1] - odds[0]).exp()))
            continue
        if loss == "simpo":
            total = total - torch.log(1 / (1 + (gamma - BETA * (chosen / n - rejected / m)).exp()))
            continue
        d, r = chosen - old_chosen, rejected - old_rejected
        difference = d / n - r / m if average else d - r
        right, wrong = (torch.log(1 / (1 + (-sign * BETA * difference).exp())) for sign in (1, -1))
        e = label_smoothing
        total = total - nll_coefficient * chosen / n
        total = (
            total
            + {
                "sigmoid": -(1 - e) * right - e * wrong,
                "robust": (-(1 - e) * right + e * wrong) / (1 - 2 * e),
                "ipo": (difference - 1 / (2 * BETA)) ** 2,
                "hinge": (1 - BETA * difference).clamp(min=0.0),
            }[loss]
        )
    return total / 3


LOSSES: list[dict[str, Any]] = [
    {"loss": "sigmoid"},
    {"loss": "sigmoid", "label_smoothing": 0.2, "nll_coefficient": 0.7},
    {"loss": "sigmoid", "average": True},
    {"loss": "robust", "label_smoothing": 0.2},
    {"loss": "ipo"},
    {"loss": "ipo", "average": True},
    {"loss": "hinge"},
    {"loss": "simpo", "gamma": 0.4},
    {"loss": "orpo"},
]


@pytest.mark.parametrize("how", LOSSES, ids=lambda how: "-".join(str(each) for each in how.values()))
def test_step_follows_the_gradient_of_a_slow_loop_however_pairs_are_packed(how: dict[str, Any]) -> None:
    before = table(seed=1)
    slow = table(seed=2)
    expected = slow_loss(slow, before, **how)
    (gradient,) = torch.autograd.grad(expected, slow)
    for micro_batches in ([[0, 1, 2, 3, 4, 5]], [[2, 3], [0, 1, 4, 5]], [[4, 5], [], [0, 1], [2, 3]]):
        logits = table(seed=2)
        losses, _ = take_step(logits, before, micro_batches, **how)
        assert losses == pytest.approx([expected.item()], abs=1e-9)
        assert torch.allclose(logits.detach(), slow.detach() - gradient, atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({"loss": "sigmoid"}, 0.6530079916255953),
        ({"loss": "hinge"}, 0.8268632797816968),
        ({"loss": "robust", "label_smoothing": 0.2}, 0.5952957515528278),
        ({"loss": "ipo", "average": True}, 3.0565779557349377),
        ({"loss": "sigmoid", "average": True}, 0.6942977827751499),
    ],
)
def test_loss_is_that_of_trl_1_16_for_the_same_pairs(how: dict[str, Any], expected: float) -> None:
    """The numbers are of DPOTrainer._compute_loss; the last is its sigmoid_norm."""
    policy, before = (formula_table(factor) for factor in (1, 2))
    losses, _ = take_step(policy, before, [[0, 1, 2, 3, 4, 5]], **how)
    assert losses == pytest.approx([expected], abs=1e-6)


def formula_table(factor: int) -> Tensor:
    """Return logits that no random generator made."""
    i, j = torch.arange(V)[:, None], torch.arange(V)
    return (((3 * i + 5 * j + factor * i * j) % 7).double() / 4).requires_grad_()


@pytest.mark.parametrize(("loss", "expected"), [("sigmoid", math.log(2)), ("ipo", 1 / (4 * BETA**2)), ("hinge", 1.0)])
def test_policy_that_is_its_reference_has_the_closed_forms_loss(loss: str, expected: float) -> None:
    before = table(seed=1)
    losses, metrics = take_step(table(seed=1), before, [[0, 1, 2, 3, 4, 5]], loss=loss)
    assert losses == pytest.approx([expected], abs=1e-12)
    assert metrics["preference/margin"] == 0.0


def test_metrics_are_means_over_pairs() -> None:
    before, logits = table(seed=1), table(seed=2)
    made, gains = pairs(), []
    for each in made:
        gains.append((slow_logp(logits, each)[0] - slow_logp(before, each)[0]).item())
    _, metrics = take_step(logits, before, [[0, 1, 2, 3, 4, 5]])
    chosen, rejected = np.array(gains[::2]), np.array(gains[1::2])
    assert metrics["preference/accuracy"] == (chosen > rejected).mean()
    assert metrics["preference/chosen"] == pytest.approx(BETA * chosen.mean())
    assert metrics["preference/rejected"] == pytest.approx(BETA * rejected.mean())
    assert metrics["preference/margin"] == pytest.approx(BETA * (chosen - rejected).mean())


def test_each_update_divides_by_its_own_pairs() -> None:
    before, logits = table(seed=1), table(seed=1)
    losses, _ = take_step(logits, before, [[0, 1], [2, 3], [4, 5]], sizes=(1, 2))
    assert len(losses) == 2
    assert losses[0] == pytest.approx(math.log(2), abs=1e-12)


def test_certain_answer_has_a_finite_odds_ratio() -> None:
    logits = torch.full((7, 7), 0.0, dtype=torch.float64)
    logits[:, 0] = 800.0  # p = 1 in every number of this size
    certain = logits.requires_grad_()
    losses, _ = take_step(certain, certain, [[0, 1, 2, 3, 4, 5]], loss="orpo")
    assert math.isfinite(losses[0])
    assert bool(certain.isfinite().all())
